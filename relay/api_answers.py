"""What an answer looks like in OpenAI's forms, whole and as chunks. Pure: messages in, JSON objects out.

A stream of one answer: a chunk with the role (chat only), chunks with text, and last a chunk without text that has the
`finish_reason` and the `foredraft` figures. If usage is asked for, every chunk has a null `usage`, and one more chunk
with the usage and no choice comes after all answers have ended.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relay.api_sessions import Pairing
from relay.stream import gaps
from wire.messages import SOURCES, Done, OpenSession, TextDelta, TokenLogprob

MAX_PLACES = 16
LEDGER = ("verify_compute_s", "verify_overhead_s", "waited_for_slot_s", "first_token_s", "answer_s")
"""Of the verify node's report: where the time of the answer went there."""
ROUND = {
    "round_draft_s": "draft compute",
    "round_draft_overhead_s": "draft overhead",
    "round_relay_s": "relay residence, up",
    "round_hop_s": "wire, relay to verify and back",
    "round_queue_s": "queue at the verifier",
    "round_verify_s": "verify compute",
    "round_verify_overhead_s": "verify overhead",
}
"""Of the verify node's report, by the names of `speculation/ledger.py`: a mean round, as far as that node sees it."""


@dataclass(slots=True)
class Collected:
    """One answer as far as it has come; times are seconds of one clock.

    Attributes:
        kept: whether text and log-probabilities are; of a streamed answer nobody asks for them again.
    """

    request: OpenSession
    opened_at: float
    kept: bool = True
    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_chars: int = 0
    """Of the tokens of `logprobs`, each read by itself."""
    num_chunks: int = 0
    first_at: float | None = None
    first_text_at: float | None = None
    last_at: float | None = None
    done: Done | None = None

    def add(self, delta: TextDelta, now: float) -> None:
        """Take a piece; one that holds nothing is none."""
        if not (delta.tokens or delta.text):
            return
        if self.kept:
            self.text.append(delta.text)
            self.logprobs += delta.logprobs or ()
        self.num_tokens += len(delta.tokens)
        self.sources.update(delta.sources)
        self.num_chunks += 1
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        if self.first_text_at is None and delta.text:
            self.first_text_at = now

    def figures(self, pairing: Pairing) -> dict[str, Any]:
        """The `foredraft` object of an answer that is done."""
        assert self.done is not None
        report = self.done.report
        waited_s = (self.last_at or self.opened_at) - self.opened_at
        lasted_s = (self.last_at or 0.0) - (self.first_at or 0.0)
        per_token_s, chunk_gap_s = gaps(lasted_s, self.num_tokens, self.num_chunks)
        places = [report.get(f"acceptance_at_{place}") for place in range(1, MAX_PLACES + 1)]
        return {
            "session": self.request.session,
            "seed": self.request.sampling.seed,
            "verify_node": pairing.verify,
            "draft_node": pairing.draft or None,
            "speculation": bool(report.get("rounds")),
            "no_speculation_because": None if report.get("rounds") else self._why_not(pairing, report),
            "time_to_first_token_s": _rounded((self.first_text_at or self.last_at or self.opened_at) - self.opened_at),
            "time_per_output_token_s": _rounded(per_token_s),
            "chunk_gap_s": _rounded(chunk_gap_s),
            "tokens_per_s": _rounded(self.num_tokens / waited_s) if waited_s > 0 else None,
            "tokens_by_source": {source: self.sources[source] for source in SOURCES},
            "passes": int(report.get("passes", 0)),
            "rounds": int(report.get("rounds", 0)),
            "drafted": int(report.get("drafted", 0)),
            "accepted": int(report.get("accepted", 0)),
            "acceptance_rate": _rounded(report.get("acceptance_rate", 0.0)),
            "mean_acceptance_length": _rounded(report.get("mean_acceptance_length", 1.0)),
            "acceptance_at_place": [_rounded(rate) for rate in places if rate is not None],
            "ledger": {name: _rounded(report[name]) for name in LEDGER if name in report},
            "round_ms": {name: _rounded(report[key] * 1e3) for key, name in ROUND.items() if key in report} or None,
        }

    def _why_not(self, pairing: Pairing, report: dict[str, float]) -> str:
        if not self.request.speculate:
            return "the request asked for the target alone"
        if not pairing.draft:
            return "no draft node that fits the target had room"
        if report.get("frames_malformed"):
            return "the draft node broke the protocol"
        if not report.get("candidates_received"):
            return "the answer ended before the first candidates came"
        return "no candidate came in time to be verified"


class Form:
    """How one endpoint words its answers.

    Args:
        answer_id: of the HTTP request's answer.
        model: that serves.
        fingerprint: of all that decides an answer, see `ModelIdentity.fingerprint`.
        created: when, in whole seconds of the wall clock.
        include_usage: whether the chunks of a stream have a `usage`.
        num_per_prompt: answers to each prompt; they stand beside each other.
    """

    whole = ""
    chunk = ""
    prefix = ""

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created: int,
        fingerprint: str = "",
        include_usage: bool = False,
        num_per_prompt: int = 1,
    ) -> None:
        self.answer_id = self.prefix + answer_id
        self.model = model
        self.fingerprint = fingerprint or None
        self.created = created
        self.include_usage = include_usage
        self.num_per_prompt = num_per_prompt

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first text."""
        return None

    def piece(self, index: int, delta: TextDelta, collected: Collected, *, with_sources: bool) -> dict[str, Any] | None:
        """The chunk of a delta that `collected` has taken; None if there is nothing in it to tell."""
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self.logprobs(delta.logprobs, collected.num_chars)
            collected.num_chars += sum(len(_text(entry.token_hex)) for entry in delta.logprobs)
        if not delta.text and logprobs is None and not with_sources:
            return None
        chunk = self.one(index, self.part(delta.text), logprobs, None)
        if with_sources:
            chunk["foredraft"] = {"tokens": delta.tokens, "sources": delta.sources, "start": delta.start}
        return chunk

    def closing(self, index: int, done: Done, figures: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of one answer."""
        return self.one(index, self.part(None), None, done.finish_reason) | {"foredraft": figures}

    def usage_chunk(self, answers: Sequence[Collected]) -> dict[str, Any]:
        """The last chunk of all, if usage is asked for."""
        return self._head(self.chunk) | {"choices": [], "usage": self._usage(answers)}

    def response(self, answers: Sequence[Collected], figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A whole answer that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            assert answer.done is not None
            logprobs = self.logprobs(answer.logprobs, 0) if answer.request.logprobs is not None else None
            choices.append(
                {
                    "index": index,
                    **self.body("".join(answer.text)),
                    "logprobs": logprobs,
                    "finish_reason": answer.done.finish_reason,
                }
            )
        shown = figures[0] if len(figures) == 1 else {"answers": figures}
        return self._head(self.whole) | {"choices": choices, "usage": self._usage(answers), "foredraft": shown}

    def one(self, index: int, part: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        """A chunk with one choice."""
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._head(self.chunk) | {"choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def part(self, text: str | None) -> dict[str, Any]:
        """The text of a chunk, None for the closing one."""
        raise NotImplementedError

    def body(self, text: str) -> dict[str, Any]:
        """The text of a whole answer."""
        raise NotImplementedError

    def logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Of some tokens; `offset` is how many characters of tokens came before."""
        raise NotImplementedError

    def _usage(self, answers: Sequence[Collected]) -> dict[str, int]:
        """Tokens of all answers; a prompt counts once however many answers it got."""
        done = [answer.done for answer in answers if answer.done is not None]
        num_prompt = sum(each.prompt_tokens for each in done[:: self.num_per_prompt])
        num_answer = sum(each.completion_tokens for each in done)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_answer, "total_tokens": num_prompt + num_answer}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ChatForm(Form):
    """/v1/chat/completions."""

    whole, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self, index: int) -> dict[str, Any]:
        """See `Form.opening`."""
        return self.one(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def part(self, text: str | None) -> dict[str, Any]:
        """See `Form.part`."""
        return {"delta": {} if text is None else {"content": text}}

    def body(self, text: str) -> dict[str, Any]:
        """See `Form.body`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """See `Form.logprobs`."""
        content = [
            _named(entry.token_hex, entry.logprob)
            | {"top_logprobs": [_named(*top) for top in zip(entry.top_hex, entry.top_logprobs, strict=False)]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


class CompletionForm(Form):
    """/v1/completions."""

    whole, chunk, prefix = "text_completion", "text_completion", "cmpl-"

    def part(self, text: str | None) -> dict[str, Any]:
        """See `Form.part`."""
        return {"text": text or ""}

    def body(self, text: str) -> dict[str, Any]:
        """See `Form.body`."""
        return {"text": text}

    def logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """See `Form.logprobs`: the older form, a list for each kind of thing."""
        texts = [_text(entry.token_hex) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {_text(top): value for top, value in zip(entry.top_hex, entry.top_logprobs, strict=False)}
                for entry in entries
            ],
            "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
        }


def _named(token_hex: str, logprob: float) -> dict[str, Any]:
    return {"token": _text(token_hex), "logprob": logprob, "bytes": list(bytes.fromhex(token_hex))}


def _text(token_hex: str) -> str:
    return bytes.fromhex(token_hex).decode("utf-8", "replace")


def _rounded(value: float) -> float:
    return round(value, 6)
