"""The protocol, on one page.

Draft node, verify node and client each dial the relay, send `Hello` and are answered by `Welcome` or `Error`.
After that, frames travel in both directions as JSON objects; the keys `type` and `session` come first, so that
the relay can route a frame without parsing the rest, and it alone may append `relay_s` at the end.

    client  -> relay  -> verify   OpenSession, Cancel, Tokenize
    client  -> relay              Resume (the client was away; it has the tokens below a position)
    relay   -> client             Serving (which target answers, and how long the session outlives its client)
    verify  -> relay  -> client   Waiting, TextDelta, Done, Error, Tokenized
    relay   -> verify             Paired (a draft node joined the session), PeerGone (it left)
    verify  -> relay  -> draft    Prefix (the ids to draft from), Acceptance (the newly committed ids)
    draft   -> relay  -> verify   Candidates (tree nodes), Resync (an acceptance is missing)
    client  -> relay  -> client   Probe (a payload whose way is measured)
    relay   -> draft              Release (the session is over)
    any     -> any neighbour      Ping, Pong, Draining, Error

Positions are indices into prompt + answer. A candidate node is named by an id that grows by one per session and
epoch; an epoch is one pairing of a session with a draft node, counted by the relay. Committed tokens are final,
so each message may arrive late or twice without harm. Durations are in seconds of one clock; no wall clock
crosses the wire. `wire/codec.py` holds frames to MAX_FRAME_BYTES at every hop.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

from wire.errors import ProtocolError
from wire.fields import check_choice, check_int, check_ints, check_number, check_text
from wire.sampling import MAX_TOKEN_ID, Sampling

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
MAX_NAME_CHARS = 256
MAX_PROMPT_CHARS = 900_000
MAX_POSITION = 1 << 24
MAX_NODE_ID = 1 << 40
MAX_NODES_PER_FRAME = 1024
MAX_ROUNDS_PER_FRAME = 64
MAX_TOKENS_PER_FRAME = 65_536
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_ERROR_CHARS = 8192
MAX_DURATION_S = 1e7
PROBE_PREFIX = "hop:"
"""Names of clients that take probes begin with it, so that no other client is ever sent one."""
ROLES = ("draft", "verify", "client")
FINISH_REASONS = ("stop", "length", "cancelled")
SOURCES = ("draft", "local", "plain")
"""Where a committed token came from: a candidate of the draft node, one made beside the target, or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages. `type` is the name on the wire."""

    type: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What a node serves, as compared in the handshake.

    Attributes:
        name: model id or directory name.
        revision: of the checkpoint, or a digest of its config where it has none.
        tokenizer: SHA-256 over the id-to-token map and the special ids, in hex.
        vocab_size: number of real token ids; logits may be padded beyond it.
        context_length: most tokens of prompt + answer.
        stop_ids: the union of the end tokens of tokenizer and generation config.
        weights: digest of the weights; a replacement verify node must have the same.
        drafts_for: for a drafter trained for one target, that target's "name@revision"; else empty.
    """

    name: str
    revision: str
    tokenizer: str
    vocab_size: int
    context_length: int
    stop_ids: tuple[int, ...] = ()
    weights: str = ""
    drafts_for: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "tokenizer"):
            check_text(f"model.{name}", getattr(self, name), MAX_NAME_CHARS, empty=False)
        for name in ("revision", "weights", "drafts_for"):
            check_text(f"model.{name}", getattr(self, name), MAX_NAME_CHARS)
        check_int("model.vocab_size", self.vocab_size, 1, MAX_TOKEN_ID)
        check_int("model.context_length", self.context_length, 2, MAX_POSITION)
        check_ints("model.stop_ids", self.stop_ids, 0, self.vocab_size - 1, 64)

    @property
    def fingerprint(self) -> str:
        """Names everything that decides an answer: a verify node with the same one continues it without a trace."""
        parts = (
            self.name, self.revision, self.tokenizer, self.vocab_size, self.context_length, self.stop_ids, self.weights
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return (
            f"{self.name}@{self.revision or '-'} (tokenizer {self.tokenizer[:12]}, "
            f"{self.vocab_size} ids, protocol {PROTOCOL_VERSION})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First frame of every peer."""

    type: ClassVar[str] = "hello"
    protocol: int
    role: str
    name: str
    region: str = ""
    capacity: int = 1
    model: ModelIdentity | None = None

    def __post_init__(self) -> None:
        check_int("hello.protocol", self.protocol, 0, 2**31 - 1)
        check_choice("hello.role", self.role, ROLES)
        check_text("hello.name", self.name, MAX_NAME_CHARS, empty=False)
        check_text("hello.region", self.region, MAX_NAME_CHARS)
        check_int("hello.capacity", self.capacity, 1, 65_536)
        if (self.model is None) != (self.role == "client"):
            raise ProtocolError(f"hello.model must be given by nodes and only by them, role is {self.role}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The relay's answer to `Hello`: the peer is in, under these terms.

    Attributes:
        frames_per_s, bytes_per_s: what the relay reads of all links with the peer's credential; 0 for no limit.
    """

    type: ClassVar[str] = "welcome"
    protocol: int
    peer: str
    max_frame_bytes: int
    ping_interval_s: float
    ping_timeout_s: float
    frames_per_s: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_int("welcome.protocol", self.protocol, 0, 2**31 - 1)
        check_text("welcome.peer", self.peer, MAX_NAME_CHARS, empty=False)
        check_int("welcome.max_frame_bytes", self.max_frame_bytes, 1024, 1 << 30)
        check_number("welcome.ping_interval_s", self.ping_interval_s, 0.01, 3600)
        check_number("welcome.ping_timeout_s", self.ping_timeout_s, 0.01, 3600)
        check_number("welcome.frames_per_s", self.frames_per_s, 0.0, float("inf"))
        check_number("welcome.bytes_per_s", self.bytes_per_s, 0.0, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMessage(Message):
    """Base of the messages that belong to one session."""

    session: str

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation, rendered by the checkpoint's own chat template."""

    role: str
    content: str

    def __post_init__(self) -> None:
        check_text("messages.role", self.role, 64, empty=False)
        check_text("messages.content", self.content, MAX_PROMPT_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession(SessionMessage):
    """A request: exactly one of `prompt`, `messages`, `prompt_ids`.

    Attributes:
        model: name the client asks for, empty for any.
        max_tokens: most tokens of the answer; 0 for up to the context limit.
        stop: strings that end the answer; they are not part of it.
        logprobs: how many of the target's top log-probabilities to report with each token, None for none.
        speculate: False for the target alone (the baseline a speed-up is measured against).
        ignore_eos: go on after a stop id.
        committed: tokens of the answer that are final already; the answer goes on behind them.
        target: fingerprint of the model that committed them (`ModelIdentity.fingerprint`); empty for any.
        resume_key: with one, the session outlives its client's link for a while, and `Resume` with it takes it back.
    """

    type: ClassVar[str] = "open_session"
    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    speculate: bool = True
    ignore_eos: bool = False
    committed: tuple[int, ...] = ()
    target: str = ""
    resume_key: str = ""

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_text("model", self.model, MAX_NAME_CHARS)
        check_ints("committed", self.committed, 0, MAX_TOKEN_ID, MAX_POSITION)
        check_text("target", self.target, 64)
        check_text("resume_key", self.resume_key, 64)
        _check_prompt(self)
        check_int("max_tokens", self.max_tokens, 0, MAX_POSITION)
        if len(self.stop) > MAX_STOPS:
            raise ProtocolError(f"stop has {len(self.stop)} strings, the limit is {MAX_STOPS}")
        for i, text in enumerate(self.stop):
            check_text(f"stop[{i}]", text, 1024, empty=False)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _check_prompt(message: OpenSession | Tokenize) -> None:
    given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(message, name) is not None]
    if len(given) != 1:
        raise ProtocolError(f"give exactly one of prompt, messages, prompt_ids; got {', '.join(given) or 'none'}")
    if message.prompt is not None:
        check_text("prompt", message.prompt, MAX_PROMPT_CHARS)
    if message.prompt_ids is not None:
        check_ints("prompt_ids", message.prompt_ids, 0, MAX_TOKEN_ID, MAX_POSITION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(SessionMessage):
    """The client does not want the rest; also sent by the relay when the client is gone."""

    type: ClassVar[str] = "cancel"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenize(SessionMessage):
    """What are the ids of this text or conversation, or the text of these ids? Exactly one of the three.

    The session is one of its own, over with the `Tokenized` or Error that answers.
    """

    type: ClassVar[str] = "tokenize"
    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_text("model", self.model, MAX_NAME_CHARS)
        _check_prompt(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized(SessionMessage):
    """The answer to `Tokenize`: ids and text, the text with special tokens hidden; and the model's context length."""

    type: ClassVar[str] = "tokenized"
    tokens: tuple[int, ...]
    text: str
    context_length: int

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_ints("tokenized.tokens", self.tokens, 0, MAX_TOKEN_ID, MAX_POSITION)
        check_text("tokenized.text", self.text, MAX_FRAME_BYTES)
        check_int("tokenized.context_length", self.context_length, 1, MAX_POSITION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(SessionMessage):
    """Relay to a client that gave a `resume_key`: its session has a verify node.

    Attributes:
        model: name of the model that answers.
        target: its fingerprint; who opens the session anew, behind the tokens that it has, asks for the same.
        keep_s: how long the session outlives its client's link.
    """

    type: ClassVar[str] = "serving"
    model: str
    target: str
    keep_s: float

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_text("serving.model", self.model, MAX_NAME_CHARS)
        check_text("serving.target", self.target, 64, empty=False)
        check_number("serving.keep_s", self.keep_s, 0.0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(SessionMessage):
    """Verify node to client: all slots are taken; the session is number `place` of those that wait, 1 the next to go.

    Sent again whenever that changes, and not when the session gets its slot: the answer says so.
    """

    type: ClassVar[str] = "waiting"
    place: int

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("waiting.place", self.place, 1, 65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(SessionMessage):
    """A client is back: send the answer from `position` on, counted from its start.

    Answered by what was committed since, or by an Error: "unknown_session" (ended, or the relay is a new one) or
    "resume_gone" (the relay does not have those tokens any more); then the client may open the session anew.
    """

    type: ClassVar[str] = "resume"
    key: str
    position: int

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_text("resume.key", self.key, 64, empty=False)
        check_int("resume.position", self.position, 0, MAX_POSITION)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The target's log-probabilities at one position: of its logits after penalties and bias, before the
    temperature and the top-k, top-p and min-p filters.

    Attributes:
        token_hex, top_hex: the tokens' own bytes, in hex, for readers without a tokenizer; of several tokens that make
            up one character, none is text by itself.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    token_hex: str = ""
    top_hex: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta(SessionMessage):
    """Newly committed tokens, for the client.

    Attributes:
        start: position of `tokens[0]`, counted from the start of the answer.
        tokens: the committed ids, stop id included.
        text: what they add to the shown text; may be empty while a character or a stop string is incomplete.
        sources: one of SOURCES for each token.
        logprobs: one for each token if they were asked for.
    """

    type: ClassVar[str] = "text_delta"
    start: int
    tokens: tuple[int, ...]
    text: str
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("text_delta.start", self.start, 0, MAX_POSITION)
        check_ints("text_delta.tokens", self.tokens, 0, MAX_TOKEN_ID, MAX_TOKENS_PER_FRAME)
        check_text("text_delta.text", self.text, MAX_PROMPT_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(SessionMessage):
    """The answer is complete.

    Attributes:
        finish_reason: one of FINISH_REASONS.
        prompt_tokens, completion_tokens: usage, stop id included; no prompt_tokens where no verify node counted them.
        report: figures of the session by name (counts and seconds), see `speculation/stats.py`.
    """

    type: ClassVar[str] = "done"
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    report: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_choice("done.finish_reason", self.finish_reason, FINISH_REASONS)
        check_int("done.prompt_tokens", self.prompt_tokens, 0, MAX_POSITION)
        check_int("done.completion_tokens", self.completion_tokens, 0, MAX_POSITION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """Something went wrong; with a session, only that session ends.

    Attributes:
        code: for programs, e.g. "bad_request", "mismatch", "no_verify_node", "verify_lost", "malformed".
        message: for people; names the field, the value and the limit.
    """

    type: ClassVar[str] = "error"
    session: str | None = None
    code: str
    message: str

    def __post_init__(self) -> None:
        if self.session is not None:
            check_text("session", self.session, 64, empty=False)
        check_text("error.code", self.code, 64, empty=False)
        check_text("error.message", self.message, MAX_ERROR_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired(SessionMessage):
    """Relay to verify node: this draft node serves the session from now on, under this epoch."""

    type: ClassVar[str] = "paired"
    epoch: int
    draft: str

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("paired.epoch", self.epoch, 1, MAX_POSITION)
        check_text("paired.draft", self.draft, MAX_NAME_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone(SessionMessage):
    """Relay to verify node: the session has lost its draft node."""

    type: ClassVar[str] = "peer_gone"
    role: str
    reason: str = ""

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_choice("peer_gone.role", self.role, ROLES)
        check_text("peer_gone.reason", self.reason, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(SessionMessage):
    """Relay to draft node: the session is over, or another draft node has it; free its cache."""

    type: ClassVar[str] = "release"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix(SessionMessage):
    """Verify to draft node: draft from here. Long prefixes come in several parts.

    Attributes:
        start: position of `tokens[0]`.
        total: committed length of the whole prefix; drafting starts when positions 0..total-1 are known.
        digest: SHA-256 over all `total` ids (`wire.codec.digest_ids`).
        limit: no position at or beyond it will ever be committed, and none at limit-1 need be drafted.
        sampling: the drafter ranks its candidates with the same noise.
        prompt_tokens: where the answer starts; penalties look at it.
    """

    type: ClassVar[str] = "prefix"
    epoch: int
    start: int
    tokens: tuple[int, ...]
    total: int
    digest: str
    limit: int
    prompt_tokens: int
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("prefix.epoch", self.epoch, 1, MAX_POSITION)
        check_int("prefix.total", self.total, 1, MAX_POSITION)
        check_ints("prefix.tokens", self.tokens, 0, MAX_TOKEN_ID, MAX_TOKENS_PER_FRAME)
        check_int("prefix.start", self.start, 0, self.total - len(self.tokens))
        check_int("prefix.limit", self.limit, self.total, MAX_POSITION)
        check_int("prefix.prompt_tokens", self.prompt_tokens, 1, self.total)
        check_text("prefix.digest", self.digest, 64, empty=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRound:
    """How the round of one frame of candidates ended at the draft node, all durations of that node's clock.

    Attributes:
        frame: the frame's number.
        relay_s: residence of the acceptance that answered it in the relay, on the way down.
        apply_s: from the arrival of that acceptance until the tree had moved along it.
        round_s: the whole round, from the start of the frame's drafting.
    """

    frame: int
    relay_s: float
    apply_s: float
    round_s: float

    def __post_init__(self) -> None:
        check_int("applied.frame", self.frame, 0, MAX_NODE_ID)
        for name in ("relay_s", "apply_s", "round_s"):
            check_number(f"applied.{name}", getattr(self, name), 0.0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(SessionMessage):
    """Draft to verify node: nodes appended to the session's tree, node i having the id first_node + i.

    Attributes:
        frame: number of this frame in the epoch, from 0; acceptances answer frames by it.
        parents: of each node: an earlier node's id, or, for a root, minus the committed length it follows
            (always negative: a prompt has at least one token).
        tokens: token id of each node.
        scores: 0..255 for each node, its log-probability given its parent as -score / 16 nats (255: below -15.9).
        draft_s, overhead_s: time the drafter spent on these nodes in the model and around it.
        applied: earlier frames whose rounds are over since the last frame; for whoever watches.
        relay_s: added by the relay: how long the frame was inside it.
    """

    type: ClassVar[str] = "candidates"
    epoch: int
    frame: int
    first_node: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[int, ...]
    draft_s: float = 0.0
    overhead_s: float = 0.0
    applied: tuple[AppliedRound, ...] = ()
    relay_s: float = 0.0

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("candidates.epoch", self.epoch, 1, MAX_POSITION)
        check_int("candidates.frame", self.frame, 0, MAX_NODE_ID)
        check_int("candidates.first_node", self.first_node, 0, MAX_NODE_ID)
        check_ints("candidates.tokens", self.tokens, 0, MAX_TOKEN_ID, MAX_NODES_PER_FRAME)
        check_ints("candidates.scores", self.scores, 0, 255, MAX_NODES_PER_FRAME)
        last = self.first_node + len(self.tokens) - 1
        check_ints("candidates.parents", self.parents, -MAX_POSITION, last, MAX_NODES_PER_FRAME)
        if not len(self.parents) == len(self.tokens) == len(self.scores) > 0:
            raise ProtocolError(
                "candidates must have as many parents as tokens and scores, and at least one; got "
                f"{len(self.parents)}, {len(self.tokens)}, {len(self.scores)}"
            )
        for node, parent in enumerate(self.parents, self.first_node):
            if parent >= node:
                raise ProtocolError(f"candidates.parents of node {node} must be an earlier node, got {parent}")
        if len(self.applied) > MAX_ROUNDS_PER_FRAME:
            raise ProtocolError(
                f"candidates.applied has {len(self.applied)} entries, the limit is {MAX_ROUNDS_PER_FRAME}"
            )
        for name in ("draft_s", "overhead_s", "relay_s"):
            check_number(f"candidates.{name}", getattr(self, name), 0.0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTiming:
    """How one frame of candidates fared at the verify node, all durations of that node's clock.

    Attributes:
        frame: the frame's number.
        relay_s: its residence in the relay on the way up.
        queue_s: from its arrival to the start of the pass that first saw it.
        verify_s: the model's share of that pass.
        overhead_s: from the start of the pass to the sending of this acceptance, less verify_s.
    """

    frame: int
    relay_s: float
    queue_s: float
    verify_s: float
    overhead_s: float

    def __post_init__(self) -> None:
        check_int("rounds.frame", self.frame, 0, MAX_NODE_ID)
        for name in ("relay_s", "queue_s", "verify_s", "overhead_s"):
            check_number(f"rounds.{name}", getattr(self, name), 0.0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance(SessionMessage):
    """Verify to draft node: the tokens committed by one pass (or, after `Resync`, by several).

    Attributes:
        start: position of `tokens[0]`.
        num_accepted: how many of them were candidates; the rest is the correction, bonus or plain token.
        wanted: whether the draft node should go on drafting; False while it does not pay.
        orphan_frame: the last frame that had nodes with an unknown parent, -1 for none: a frame before it was lost.
        rounds: the frames this pass was the first to see.
        hop_rtt_s: round trip between verify node and relay.
        relay_s: added by the relay.
    """

    type: ClassVar[str] = "acceptance"
    epoch: int
    start: int
    tokens: tuple[int, ...]
    num_accepted: int = 0
    wanted: bool = True
    orphan_frame: int = -1
    rounds: tuple[RoundTiming, ...] = ()
    hop_rtt_s: float = 0.0
    relay_s: float = 0.0

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("acceptance.epoch", self.epoch, 1, MAX_POSITION)
        check_int("acceptance.start", self.start, 0, MAX_POSITION)
        check_ints("acceptance.tokens", self.tokens, 0, MAX_TOKEN_ID, MAX_TOKENS_PER_FRAME)
        check_int("acceptance.num_accepted", self.num_accepted, 0, len(self.tokens))
        check_int("acceptance.orphan_frame", self.orphan_frame, -1, MAX_NODE_ID)
        for name in ("hop_rtt_s", "relay_s"):
            check_number(f"acceptance.{name}", getattr(self, name), 0.0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync(SessionMessage):
    """Draft to verify node: I know positions below `length`; an acceptance after that never came."""

    type: ClassVar[str] = "resync"
    epoch: int
    length: int

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_int("resync.epoch", self.epoch, 1, MAX_POSITION)
        check_int("resync.length", self.length, 0, MAX_POSITION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Message):
    """The sender takes no new sessions and will be gone after `grace_s`."""

    type: ClassVar[str] = "draining"
    grace_s: float
    reason: str = ""

    def __post_init__(self) -> None:
        check_number("draining.grace_s", self.grace_s, 0.0, MAX_DURATION_S)
        check_text("draining.reason", self.reason, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Are you there? Answered at once by `Pong` with the same number."""

    type: ClassVar[str] = "ping"
    number: int

    def __post_init__(self) -> None:
        check_int("ping.number", self.number, 0, MAX_NODE_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Message):
    """The answer to `Ping`; `residence_s` is how long the answerer held it."""

    type: ClassVar[str] = "pong"
    number: int
    residence_s: float = 0.0

    def __post_init__(self) -> None:
        check_int("pong.number", self.number, 0, MAX_NODE_ID)
        check_number("pong.residence_s", self.residence_s, 0.0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(SessionMessage):
    """A payload between two clients of one credential that measure their way through the relay (`foredraft-hop`).

    Attributes:
        session: name of the client that it is for, as in its Hello; it begins with PROBE_PREFIX.
        sender: name of the client that waits for the answer; empty in an answer, which is a Probe as well.
        answer_bytes: size of the answer's `pad`.
        pad: the payload.
    """

    type: ClassVar[str] = "probe"
    sender: str = ""
    answer_bytes: int = 0
    pad: str = ""

    def __post_init__(self) -> None:
        check_text("session", self.session, 64, empty=False)
        check_text("probe.sender", self.sender, 64)
        check_int("probe.answer_bytes", self.answer_bytes, 0, MAX_FRAME_BYTES)
        check_text("probe.pad", self.pad, MAX_FRAME_BYTES)


MESSAGES: dict[str, type[Message]] = {
    cls.type: cls
    for cls in (
        Hello, Welcome, OpenSession, Resume, Serving, Waiting, Cancel, Tokenize, Tokenized, TextDelta, Done, Error,
        Paired, PeerGone, Release, Prefix, Candidates, Acceptance, Resync, Draining, Ping, Pong, Probe,
    )
}  # fmt: skip
