"""Text, tokenization and chunking at random, with real tokenizers: what is shown is the whole decode up to the stop."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bytes import ByteTokenizer
from engine.tiny import tiny_tokenizer
from engine.tokenizer import TextCodec, Tokenizer
from node_verify.text import AnswerText
from tests.engine.test_tokenizer import sentencepiece_tokenizer
from tests.node_verify.test_text import splits

ALPHABET = "ab 'x,\n🙂日é we like short tests the mint tea"
texts = st.text(st.sampled_from(ALPHABET), max_size=24)


@cache
def codec(kind: str) -> TextCodec:
    kinds = {"bytes": ByteTokenizer, "byte level": lambda: Tokenizer(tiny_tokenizer(320)),
             "sentencepiece": sentencepiece_tokenizer}  # fmt: skip
    return kinds[kind]()


def without_bos(tokenizer: TextCodec, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    return ids[1:] if ids and not tokenizer.decode(ids[:1]) and tokenizer.decode(ids[1:]) else ids


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: of all matches the one that ends first, of those the longest."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


@pytest.mark.parametrize("kind", ["bytes", "byte level", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_joined_deltas_are_the_whole_decode_up_to_the_stop(kind: str, data: st.DataObject) -> None:
    tokenizer = codec(kind)
    prompt = tokenizer.encode(data.draw(texts, "prompt") or "a")
    # Encoded piece by piece, a text gets tokens that the tokenizer alone would never choose for it.
    answer = [
        token for piece in data.draw(st.lists(texts, max_size=6), "pieces") for token in without_bos(tokenizer, piece)
    ]
    stops = data.draw(st.lists(st.text(st.sampled_from(ALPHABET), min_size=1, max_size=4), max_size=3), "stops")
    whole = tokenizer.decode([*prompt, *answer])[len(tokenizer.decode(prompt)) :]
    text = AnswerText(tokenizer.decode_stream(prompt), stops)
    shown, num_tokens, stopped = [], 0, False
    while num_tokens < len(answer) and not stopped:
        block = answer[num_tokens : num_tokens + data.draw(st.integers(1, 6), "block")]
        push = text.push(block)
        shown.append(push.text)
        num_tokens += push.num_tokens
        stopped = push.stopped
    shown.append(text.finish())
    cut = first_stop(whole, stops)
    assert "".join(shown) == whole[:cut]
    assert text.finish() == ""


@pytest.mark.parametrize("text", ["we like short tests", "x     y", "the 'mint' tea"])
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_c050_no_space_is_lost_wherever_the_answer_begins_and_however_it_is_chunked(kind: str, text: str) -> None:
    tokenizer = codec(kind)
    ids = tokenizer.encode(text)
    for start in range(1, len(ids)):
        prompt, answer = ids[:start], ids[start:]
        whole = tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
        # Every chunking of the last ten tokens; what is before them comes at once.
        fixed, free = answer[:-10], answer[-10:]
        for blocks in splits(free):
            shown = AnswerText(tokenizer.decode_stream(prompt), ["'mint,", " " * 9])
            pushed = [shown.push(block).text for block in (fixed, *blocks)]
            assert "".join(pushed) + shown.finish() == whole


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_c052_a_special_id_in_mid_answer_is_hidden_and_its_letters_are_not(size: int) -> None:
    tokenizer = codec("byte level")
    begin, im_end = 3, 2
    assert tokenizer.token_bytes(begin) == b"<|begin|>"
    prompt = tokenizer.encode_chat([{"role": "user", "content": "what does <|im_end|> mean?"}])
    assert prompt.count(im_end) == 1, "the template's own: letters in a message are no control id"
    spelled = [token for letter in "<|im_end|>" for token in tokenizer.encode(letter)]
    assert im_end not in spelled
    answer = [*tokenizer.encode("the end"), begin, *tokenizer.encode(" of "), *spelled, im_end]
    text = AnswerText(tokenizer.decode_stream(prompt), ["of <|begin|>"])
    pushes = [text.push(answer[i : i + size]) for i in range(0, len(answer), size)]
    assert "".join(push.text for push in pushes) + text.finish() == "the end of <|im_end|>"
    assert sum(push.num_tokens for push in pushes) == len(answer), "hidden ids count all the same"


@pytest.mark.parametrize("kind", ["bytes", "byte level", "sentencepiece"])
def test_the_bytes_of_tokens_joined_are_the_text(kind: str) -> None:
    tokenizer = codec(kind)
    for text in ("we like short tests", "Hi 🙂🙂 日本語", "x     y, 'mint'"):
        joined = b"".join(tokenizer.token_bytes(token) for token in without_bos(tokenizer, text))
        assert joined.decode().removeprefix(" ") == text
    assert all(isinstance(tokenizer.token_bytes(token), bytes) for token in range(tokenizer.vocab_size))


def test_special_tokens_are_spelled_by_their_names() -> None:
    tokenizer = codec("byte level")
    assert [tokenizer.token_bytes(token) for token in range(3)] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert tokenizer.token_bytes(10_000) == b""
