"""The side of a session that faces its draft node: prefix out, candidates in, acceptances out."""

from __future__ import annotations

from collections.abc import Sequence

from node_verify.session import ReceivedFrame, Send, Session
from speculation.passes import VerifyResult
from speculation.tree import Arrival, MalformedCandidate, score_logprob
from wire.codec import digest_ids
from wire.messages import (
    MAX_TOKENS_PER_FRAME,
    Acceptance,
    Candidates,
    Error,
    Prefix,
    Resync,
    RoundTiming,
)

PREFIX_PART_TOKENS = 8192
"""At most about 56 KB a frame, so that a long prompt does not hold up other sessions' frames."""


def prefix_parts(session: Session) -> list[Send]:
    """Tell the draft node where to draft from, in parts that do not hold up other sessions."""
    if session.request is None or session.tree is None or not session.drafting or not session.request.speculate:
        return []
    tokens = session.tree.committed
    digest = digest_ids(tokens)
    return [
        Send(
            Prefix(
                session=session.id,
                epoch=session.epoch,
                start=start,
                tokens=tuple(tokens[start : start + PREFIX_PART_TOKENS]),
                total=len(tokens),
                digest=digest,
                limit=session.request.limit,
                prompt_tokens=len(session.request.prompt_ids),
                sampling=session.request.sampling,
            )
        )
        for start in range(0, len(tokens), PREFIX_PART_TOKENS)
    ]


def take_candidates(session: Session, message: Candidates, *, vocab_size: int, now: float) -> list[Send]:
    """Put the nodes into the session's tree; count what is stale, refuse a drafter that breaks the protocol."""
    session.stats.num_frames += 1
    session.stats.num_received += len(message.tokens)
    if not session.drafting or session.tree is None or message.epoch != session.epoch:
        session.stats.num_stale += len(message.tokens)
        return []
    session.frames.append(ReceivedFrame(message.frame, now, message.relay_s, message.draft_s, message.overhead_s))
    for i, (parent, token, score) in enumerate(zip(message.parents, message.tokens, message.scores, strict=True)):
        try:
            if token >= vocab_size:
                raise MalformedCandidate(f"token must be in 0..{vocab_size - 1}, got {token}")
            arrival = session.tree.add(message.first_node + i, parent, token, score_logprob(score))
        except MalformedCandidate as exc:
            return refuse_drafter(session, str(exc))
        if arrival is Arrival.ORPHAN:
            session.stats.num_orphaned += 1
            session.orphan_frame = max(session.orphan_frame, message.frame)
        elif arrival is Arrival.DUPLICATE:
            session.stats.num_duplicate += 1
        elif arrival is not Arrival.LIVE:
            session.stats.num_stale += 1
    return []


def refuse_drafter(session: Session, why: str) -> list[Send]:
    """A drafter that breaks the protocol is not listened to again in this epoch; the answer goes on."""
    if not session.drafting:
        return []
    session.drafting = False
    session.stats.num_malformed += 1
    return [Send(Error(session=session.id, code="malformed", message=f"candidates of session {session.id}: {why}"))]


def missing_acceptance(session: Session, message: Resync, *, wanted: bool) -> list[Send]:
    """What was committed since the length that the draft node knows; nothing if it is up to date."""
    if session.tree is None or message.epoch != session.epoch or message.length >= session.tree.length:
        return []
    # No more than fits a frame; of the rest the draft node learns by asking again.
    missing = tuple(session.tree.committed[message.length : message.length + MAX_TOKENS_PER_FRAME])
    answer = Acceptance(session=session.id, epoch=session.epoch, start=message.length, tokens=missing, wanted=wanted)
    return [Send(answer)]


def acceptance(
    session: Session,
    *,
    start: int,
    tokens: Sequence[int],
    num_accepted: int,
    wanted: bool,
    result: VerifyResult,
    began_at: float,
    now: float,
    hop_rtt_s: float,
) -> Acceptance:
    """The acceptance of the pass that ran from `began_at` to `now`; it answers the frames that had arrived before."""
    rounds = []
    while session.frames and session.frames[0].arrived_at <= began_at:
        frame = session.frames.popleft()
        timing = RoundTiming(
            frame=frame.frame,
            relay_s=frame.relay_s,
            queue_s=began_at - frame.arrived_at,
            verify_s=result.compute_s,
            overhead_s=max(0.0, now - began_at - result.compute_s),
        )
        session.rounds.add(frame, timing, hop_rtt_s)
        rounds.append(timing)
    orphan_frame, session.orphan_frame = session.orphan_frame, -1
    return Acceptance(
        session=session.id,
        epoch=session.epoch,
        start=start,
        tokens=tuple(tokens),
        num_accepted=num_accepted,
        wanted=wanted,
        orphan_frame=orphan_frame,
        rounds=tuple(rounds),
        hop_rtt_s=hop_rtt_s,
    )
