"""The shown text is a function of the tokens, whatever blocks they come in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.bytes import EOS, ByteTokenizer
from node_verify.text import AnswerText, DecodeStream, Push


class PieceStream:
    """A decode stream over a vocabulary of pieces that mark words by a leading ▁, as SentencePiece does.

    Decoding whole ids drops the space that the first piece of a text writes; within an answer it stays.
    """

    def __init__(self, pieces: Sequence[str], *, in_text: bool = True) -> None:
        self._pieces = pieces
        self._in_text = in_text

    def push(self, token: int) -> str:
        text = self._pieces[token].replace("▁", " ")
        first, self._in_text = not self._in_text, True
        return text.removeprefix(" ") if first else text

    def flush(self) -> str:
        return ""


class HoldingStream:
    """A decode stream that shows each piece one token late, as one with incomplete characters may."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._late = ""

    def push(self, token: int) -> str:
        text, self._late = self._late, self._pieces[token]
        return text

    def flush(self) -> str:
        text, self._late = self._late, ""
        return text


def splits(tokens: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Every way to cut the tokens into blocks."""
    for cuts in itertools.product((False, True), repeat=max(0, len(tokens) - 1)):
        edges = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(tokens)]
        yield [tokens[a:b] for a, b in itertools.pairwise(edges)]


def blocks_of(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def answer(
    stream: DecodeStream, blocks: Sequence[Sequence[int]], stop: Sequence[str] = ()
) -> tuple[list[str], int, bool]:
    """Deltas, tokens that count and whether a stop string ended it, as the scheduler reads them."""
    text = AnswerText(stream, stop)
    deltas, num_tokens = [], 0
    for block in blocks:
        push = text.push(block)
        deltas.append(push.text)
        num_tokens += push.num_tokens
        if push.stopped:
            break
    else:
        push = Push("", 0, False)
    deltas.append(text.finish())
    return deltas, num_tokens, push.stopped


def bytes_of(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def by_bytes() -> DecodeStream:
    return ByteTokenizer().decode_stream([])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 20])
def test_c005_c007_a_stop_string_inside_a_block_cuts_text_and_tokens_alike(size: int) -> None:
    tokens = bytes_of("abcSTOPdefghijklmnop")
    deltas, num_tokens, stopped = answer(by_bytes(), blocks_of(tokens, size), ["STOP"])
    assert "".join(deltas) == "abc"
    assert num_tokens == 7
    assert stopped


def test_c007_the_token_that_completes_the_stop_is_the_last_that_counts() -> None:
    text = AnswerText(PieceStream(["a", "b", "ST", "OP and more"]), ["STOP"])
    assert text.push([0, 1, 2, 3, 0, 1, 2, 3, 0]) == Push("ab", 4, True)
    assert text.push([0, 1]) == Push("", 0, True)
    assert text.push([]) == Push("", 0, True)
    assert text.finish() == ""


def test_c007_without_a_stop_string_every_token_counts_the_end_token_too() -> None:
    text = AnswerText(by_bytes(), ["STOP"])
    assert text.push([*bytes_of("abS"), EOS]) == Push("ab", 4, False)
    assert text.finish() == "S"


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("stop", [(), ("語。",), ("🙂本",)])
def test_c048_characters_of_several_tokens_come_whole(size: int, stop: tuple[str, ...]) -> None:
    whole = "Hi 🙂🙂 日本語"
    deltas, num_tokens, _ = answer(by_bytes(), blocks_of(bytes_of(whole), size), stop)
    assert "".join(deltas) == whole
    assert num_tokens == len(bytes_of(whole))
    assert "\ufffd" not in "".join(deltas)


def test_c048_a_stop_string_of_several_bytes_stops_at_its_last() -> None:
    deltas, num_tokens, stopped = answer(by_bytes(), [bytes_of("Hi 🙂🙂 日本語")], ["🙂 日"])
    assert ("".join(deltas), num_tokens, stopped) == ("Hi 🙂", len("Hi 🙂🙂 日".encode()), True)


PIECES = ["▁we", "▁like", "▁short", "▁tests", "x", "▁", "▁▁▁▁", "y", "▁the", "▁'", "mint", "'", "▁tea"]


@pytest.mark.parametrize(
    ("ids", "whole"),
    [
        ([0, 1, 2, 3], " we like short tests"),
        ([4, 6, 5, 7], "x     y"),
        ([8, 9, 10, 11, 12], " the 'mint' tea"),
    ],
)
@pytest.mark.parametrize("in_text", [True, False])
def test_c050_spaces_and_apostrophes_survive_every_chunking(ids: list[int], whole: str, in_text: bool) -> None:
    for blocks in splits(ids):
        deltas, _, _ = answer(PieceStream(PIECES, in_text=in_text), blocks, ["▁", "'mint,"])
        assert "".join(deltas) == (whole if in_text else whole.removeprefix(" "))


@pytest.mark.parametrize(
    ("whole", "stop", "shown"),
    [
        ("a green apple pie", "ple pie", "a green ap"),
        ("a green apple tart", "ple pie", "a green apple tart"),
        ("a green apple pi", "ple pie", "a green apple pi"),
        ("I agree.\nHuman: why", "\nHuman:", "I agree."),
        ("I agree.\nHumans do", "\nHuman:", "I agree.\nHumans do"),
        ("\nHuman:", "\nHuman:", ""),
    ],
)
def test_c051_a_stop_string_over_any_split_leaks_nothing_and_nothing_comes_twice(
    whole: str, stop: str, shown: str
) -> None:
    for cuts in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        pieces = [whole[a:b] for a, b in itertools.pairwise((0, *cuts, len(whole)))]
        deltas, _, stopped = answer(PieceStream(pieces), [[0], [1], [2]], [stop])
        assert "".join(deltas) == shown
        assert stopped == (stop in whole)


def test_c051_only_what_could_still_become_a_stop_is_held() -> None:
    text = AnswerText(by_bytes(), ["ple pie", "\nHuman:"])
    shown = [(letter, text.push(bytes_of(letter)).text) for letter in "apple plea\n\nH"]
    assert shown == [
        ("a", "a"),
        ("p", ""),
        ("p", "p"),
        ("l", ""),
        ("e", ""),
        (" ", ""),
        ("p", ""),
        ("l", "ple "),  # no stop any more, but "pl" starts one again
        ("e", ""),
        ("a", "plea"),
        ("\n", ""),
        ("\n", "\n"),
        ("H", ""),
    ]
    assert text.finish() == "\nH"
    assert text.finish() == ""


def test_c051_text_from_the_end_of_the_stream_is_searched_too() -> None:
    deltas, num_tokens, _ = answer(HoldingStream(["a ", "STO", "P"]), [[0, 1, 2]], ["STOP"])
    assert "".join(deltas) == "a "
    assert num_tokens == 3
    deltas, _, _ = answer(HoldingStream(["a ", "STO", "p"]), [[0, 1, 2]], ["STOP"])
    assert "".join(deltas) == "a STOp"


@pytest.mark.parametrize(
    ("whole", "stop", "shown"),
    [
        ("xabcd", ["abcd", "bc"], "xa"),  # bc ends first
        ("xabc", ["bc", "abc"], "x"),  # they end together: the longest
        ("ab--ab==", ["==", "--"], "ab"),
        ("aab", ["ab"], "a"),
        ("abababac", ["ababac"], "ab"),
    ],
)
def test_the_match_that_ends_first_wins_and_then_the_longest(whole: str, stop: list[str], shown: str) -> None:
    for stops in (stop, stop[::-1]):
        for pieces in ([whole], list(whole), [whole[:2], whole[2:]]):
            deltas, _, stopped = answer(PieceStream(pieces), [range(len(pieces))], stops)
            assert stopped
            assert "".join(deltas) == shown


def first_end(whole: str, stop: Sequence[str]) -> tuple[str, int | None]:
    """The rule read slowly: the shown text, and the characters up to the end of the match that ends first."""
    for end in range(1, len(whole) + 1):
        matches = [text for text in stop if whole[:end].endswith(text)]
        if matches:
            return whole[: end - max(map(len, matches))], end
    return whole, None


pieces_lists = st.lists(st.text("ab ", max_size=3), max_size=12)
stops = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3)


@given(pieces_lists, stops, st.lists(st.integers(1, 4)), st.sampled_from([PieceStream, HoldingStream]))
@example(["a", "ab", "b"], ["abab", "b"], [], PieceStream)
def test_every_chunking_gives_what_the_rule_says(
    pieces: list[str], stop: list[str], sizes: list[int], make: Callable[[list[str]], DecodeStream]
) -> None:
    edges = [0, *(edge for edge in itertools.accumulate(sizes) if edge < len(pieces)), len(pieces)]
    blocks = [range(a, b) for a, b in itertools.pairwise(edges)]
    shown, end = first_end("".join(pieces), stop)
    deltas, num_tokens, stopped = answer(make(pieces), blocks, stop)
    assert "".join(deltas) == shown
    one_by_one = answer(make(pieces), [[i] for i in range(len(pieces))], stop)
    assert (num_tokens, stopped) == one_by_one[1:]
    if make is PieceStream:
        ends = list(itertools.accumulate(map(len, pieces)))
        assert stopped == (end is not None)
        assert num_tokens == (len(pieces) if end is None else next(i for i, at in enumerate(ends, 1) if at >= end))


@given(pieces_lists, stops)
def test_no_more_is_held_than_could_become_a_stop(pieces: list[str], stop: list[str]) -> None:
    text, shown = AnswerText(PieceStream(pieces), stop), ""
    for i in range(len(pieces)):
        push = text.push([i])
        shown += push.text
        if push.stopped:
            return
        so_far = "".join(pieces[: i + 1])
        open_starts = [start for start in range(len(so_far)) if any(text.startswith(so_far[start:]) for text in stop)]
        assert shown == so_far[: min(open_starts, default=len(so_far))]
