"""Text to ids and back. Ids are made once, at the verify node; everybody else handles ids."""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from engine.hf_load import first_line, load_tokenizer

MAX_PENDING = 64
"""Ids held back while their text is no valid character; past that they are shown as they decode."""
MIN_CONTEXT = 8
"""Ids already shown that are decoded again as the context of the next."""
REPLACEMENT = "\ufffd"
_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes (GPT-2): printable ones spell themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class DecodeStream(Protocol):
    """Incremental detokenizing of one answer."""

    def push(self, token: int) -> str:
        """What the token adds to the shown text; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is still held back at the end; an incomplete character is not shown."""
        ...


class TextCodec(Protocol):
    """What the verify node needs of a tokenizer: `Tokenizer` here, `engine.bytes.ByteTokenizer` as a fake."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_stream(self, prompt_ids: Sequence[int]) -> DecodeStream: ...

    def token_bytes(self, token: int) -> bytes: ...

    def special_id(self, text: str) -> int | None: ...


def fingerprint_vocab(vocab: Mapping[str, int], special_ids: Mapping[str, object], special: Sequence[int]) -> str:
    """SHA-256, in hex, over the id-to-token map in order of ids, the named special ids, and which ids are special."""
    digest = hashlib.sha256()
    for token, index in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{len(token)}\t{token}\n".encode("utf-8", "surrogatepass"))
    for name, value in sorted(special_ids.items()):
        digest.update(f"{name}\t{value}\n".encode())
    digest.update(repr(sorted(special)).encode())
    return digest.hexdigest()


class Tokenizer:
    """A checkpoint's own fast tokenizer and chat template.

    Texts are encoded as the checkpoint does it, with one exception: letters in a *message* that spell a special token
    (`<|im_end|>`) stay letters. In a raw prompt they are the special token, so that callers can use a template of
    their own.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special = {token.content: index for index, token in added.items() if token.special}
        self._special_ids = frozenset(self._special.values())
        self._special_pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(self._special, key=len, reverse=True)) or r"(?!)"
        )

    @classmethod
    def load(cls, directory: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a checkpoint directory.

        Raises:
            CheckpointError: there is no fast tokenizer.
        """
        return cls(load_tokenizer(directory, trust_remote_code=trust_remote_code))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return max(vocab.values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """See `fingerprint_vocab`."""
        named = {name: getattr(self._hf, f"{name}_token_id", None) for name in ("bos", "eos", "unk", "pad")}
        return fingerprint_vocab(self._backend.get_vocab(with_added_tokens=True), named, list(self._special_ids))

    @property
    def hf(self) -> Any:
        """The transformers tokenizer."""
        return self._hf

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the BOS the tokenizer adds, once."""
        return self._one_bos(list(_encode(self._backend, text, add_special_tokens=True).ids))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation by the checkpoint's template, up to where the answer starts.

        Special tokens are those that the template writes, BOS included; it is never doubled.

        Args:
            messages: with "role" and "content".

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        if not self._hf.chat_template:
            raise ValueError("this checkpoint has no chat template; send a prompt instead of messages")
        # Letters that spell a special token are marked before the template runs and unmarked after it, which shows
        # where in the rendered text they ended up.
        contents = "".join(message["content"] for message in messages)
        mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in contents)
        names = sorted(self._special)
        marked = [
            {
                **message,
                "content": self._special_pattern.sub(lambda m: f"{mark}{names.index(m[0])}{mark}", message["content"]),
            }
            for message in messages
        ]
        try:
            rendered: str = self._hf.apply_chat_template(marked, add_generation_prompt=True, tokenize=False)
        except Exception as exc:  # jinja's own errors, and those the template raises
            raise ValueError(f"the chat template refuses these messages: {first_line(exc)}") from exc
        text, spelled = self._unmark(rendered, mark, names)
        encoding = _encode(self._backend, text, add_special_tokens=False)
        if not spelled:
            return self._one_bos(list(encoding.ids))
        ids: list[int] = []
        ends = [end for _, end in spelled]
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._special_ids:
                # The first span that ends behind the token's start; there may be as many as there are tokens.
                number = bisect.bisect_right(ends, start)
                if number < len(spelled) and spelled[number][0] < end:
                    ids.extend(self._plain.encode(text[slice(*spelled[number])], add_special_tokens=False).ids)
                    continue
            ids.append(token)
        return self._one_bos(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens hidden, nothing cleaned up."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_stream(self, prompt_ids: Sequence[int]) -> DecodeStream:
        """Incremental decoding of what follows the prompt: deltas joined are decode(prompt + answer) less
        decode(prompt)."""
        return _WindowStream(self, prompt_ids, self._special_ids)

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes, those of a special token being the letters of its name; empty for an unused id."""
        content: str | None = self._backend.id_to_token(token)
        if content is None:
            return b""
        if token in self._added_ids:
            return content.encode()
        if self._is_byte_level and all(letter in _BYTE_OF_LETTER for letter in content):
            return bytes(_BYTE_OF_LETTER[letter] for letter in content)
        if match := _BYTE_TOKEN.fullmatch(content):
            return bytes([int(match[1], 16)])
        return content.replace(_SPACE_MARK, " ").encode("utf-8", "replace")

    def special_id(self, text: str) -> int | None:
        """The special token that is spelled like this."""
        return self._special.get(text)

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self._backend.decoder)

    @cached_property
    def _plain(self) -> Any:
        """A copy that reads special tokens as text. A copy, as the switch is a state of the tokenizer."""
        plain = copy.deepcopy(self._backend)
        plain.encode_special_tokens = True
        return plain

    @staticmethod
    def _unmark(rendered: str, mark: str, names: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text with the marked letters back in place, and their spans in it."""
        parts, spans, length, last = [], [], 0, 0
        for match in re.finditer(f"{mark}(\\d+){mark}", rendered):
            before = rendered[last : match.start()]
            name = names[int(match[1])]
            length += len(before)
            spans.append((length, length + len(name)))
            length += len(name)
            parts += [before, name]
            last = match.end()
        return "".join(parts) + rendered[last:], spans

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Drop a BOS that template or caller and tokenizer both wrote."""
        bos, first = self._hf.bos_token_id, 0
        while bos is not None and ids[first : first + 2] == [bos, bos]:
            first += 1
        return ids[first:]


def _encode(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
    # As a batch of one: `encode` keeps the interpreter to itself, and with a long prompt the event loop from its links.
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


class _WindowStream:
    """Decodes a short window of ids with and without the newest ones; the difference is the delta.

    The window is never cut inside a character, and it starts in the prompt at some ids that are not special, because
    decoders treat the start of a text differently (a leading space vanishes). `tokenizers.DecodeStream` has no such
    start, and raises on byte runs that decode to less than before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], special_ids: frozenset[int]) -> None:
        start, visible = len(prompt_ids), 0
        while start > 0 and (
            visible < MIN_CONTEXT
            or (visible < MAX_PENDING and tokenizer.decode(prompt_ids[start:]).startswith(REPLACEMENT))
        ):
            start -= 1
            visible += prompt_ids[start] not in special_ids
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._shown = [list(prompt_ids[start:])]  # runs of ids, each ending a character
        self._pending: list[int] = []
        self._shown_text = tokenizer.decode(self._shown[0])

    def push(self, token: int) -> str:
        if token in self._special_ids:
            # Decoding leaves it out. Kept, a run of them, after an end that is ignored, is decoded again each time.
            return ""
        self._pending.append(token)
        text = self._text()
        if len(text) <= len(self._shown_text):
            return ""
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING:
            return ""
        delta = text[len(self._shown_text) :]
        self._shown.append(self._pending)
        self._pending = []
        while sum(map(len, self._shown[1:])) >= MIN_CONTEXT:
            del self._shown[0]
        self._shown_text = self._text()
        return delta

    def flush(self) -> str:
        delta = self._text().rstrip(REPLACEMENT)[len(self._shown_text) :]
        self._pending = []
        return delta

    def _text(self) -> str:
        return self._tokenizer.decode([*itertools.chain.from_iterable(self._shown), *self._pending])
