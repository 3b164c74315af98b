"""C047: what the coverage-guided fuzzer has found interesting is refused properly, or read as what it was routed as."""

from __future__ import annotations

from scripts.fuzz_codec import CORPUS, check, read_corpus


def test_c047_every_frame_of_the_corpus_is_refused_or_read() -> None:
    entries = read_corpus(CORPUS)
    assert len(entries) > 50
    for entry in entries:
        check(entry)
