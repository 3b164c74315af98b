"""A tokenizer of bytes, shipped as a fake for tests and scripted models."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from engine.tokenizer import fingerprint_vocab

EOS = 256


class ByteTokenizer:
    """`TextCodec` with ids 0-255 for the bytes of UTF-8 and 256 for the end."""

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def fingerprint(self) -> str:
        return fingerprint_vocab({f"byte {i}": i for i in range(256)} | {"eos": EOS}, {"eos": EOS}, [EOS])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Each message as "role: content" on a line, then the start of the answer's line."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < EOS).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte itself, nothing for the end."""
        return bytes([token]) if token < EOS else b""

    def special_id(self, text: str) -> int | None:
        """The end has no spelling."""
        return None

    def decode_stream(self, prompt_ids: Sequence[int]) -> ByteStream:
        """Incremental decoding of what follows the prompt."""
        stream = ByteStream()
        for token in prompt_ids[-4:]:  # the prompt may end inside a character
            stream.push(token)
        return stream


class ByteStream:
    """`DecodeStream` of a `ByteTokenizer`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < EOS else ""

    def flush(self) -> str:
        self._decoder.reset()
        return ""
