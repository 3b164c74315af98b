"""A chain of drafted tokens in one replay is the chain that single steps would have drafted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.capturer import CannotCapture, TapeCapturer
from engine.drafter import MAX_AHEAD, HFDrafter
from engine.errors import CacheError, NumericalError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.noise import noise_key
from node_draft.scheduler import DraftScheduler
from node_draft.session import Send
from speculation.growth import parse_growth
from speculation.passes import DraftResult, DraftStep, NodeRow, Sampling
from wire.codec import digest_ids
from wire.messages import Acceptance, Candidates, Prefix

VOCAB = 300
"""Less than the width of a row: what is beyond must not be chosen."""
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=4)]


@pytest.fixture
def lm(load_tiny: Callable[[str], CausalLM]) -> CausalLM:
    """One architecture: what differs between them is the forward's, which `test_captured.py` runs for several."""
    return load_tiny("qwen2")


def make_model(lm: CausalLM, capturer: Any = None, **sizes: int) -> CachedModel:
    sizes = {"num_slots": 2, "max_length": 160, "max_tree_rows": 24, "first_segment": 64} | sizes
    plain = CausalLM(lm.model, lean=False)
    model = CachedModel(plain, capturer=capturer or TapeCapturer(), chain_vocab=VOCAB, **sizes)  # type: ignore[arg-type]
    model.warm_up()
    return model


def make_drafters(lm: CausalLM, capturer: Any = None) -> tuple[HFDrafter, HFDrafter]:
    """One that drafts chains in a replay, and one that takes every step by itself."""
    eager = CachedModel(lm, num_slots=2, max_length=160, max_tree_rows=24)
    return HFDrafter(make_model(lm, capturer), vocab_size=VOCAB), HFDrafter(eager, vocab_size=VOCAB)


def step(drafter: HFDrafter, **fields: Any) -> DraftResult:
    defaults: dict[str, Any] = {
        "slot": 0, "accepted": (), "keep": frozenset(), "commit_start": 0, "commit": (), "nodes": (),
        "expand_root": bool(fields.get("commit")) and not fields.get("nodes"), "num_children": 1,
    }  # fmt: skip
    (result,) = drafter.step([DraftStep(**(defaults | fields))])
    if isinstance(result, Exception):
        raise result
    return result


def chain_of(result: DraftResult) -> list[int]:
    return [children[0].token for children in result.children.values()]


def one_at_a_time(drafter: HFDrafter, prompt: tuple[int, ...], num: int) -> tuple[list[int], list[float]]:
    tokens, logprobs = [], []
    result = step(drafter, commit=prompt)
    for node in range(num):
        (child,) = result.children[node - 1]
        tokens.append(child.token)
        logprobs.append(child.logprob)
        row = NodeRow(node=node, parent=node - 1, token=child.token)
        result = step(drafter, keep=frozenset(range(node)), commit_start=len(prompt), nodes=(row,))
    return tokens, logprobs


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_ahead", [1, 6, MAX_AHEAD])
def test_a_chain_is_what_single_steps_draft(lm: CausalLM, sampling: Sampling, num_ahead: int) -> None:
    chained, single = make_drafters(lm)
    prompt = (5, 9, 200, 31, 7)
    for drafter in (chained, single):
        drafter.open(0, sampling=sampling, num_prompt=3)
    result = step(chained, commit=prompt, num_ahead=num_ahead, first_node=0)
    tokens, logprobs = one_at_a_time(single, prompt, num_ahead + 1)
    assert list(result.children) == [-1, *range(num_ahead)]
    assert chain_of(result) == tokens
    assert [children[0].logprob for children in result.children.values()] == pytest.approx(logprobs, abs=1e-4)
    assert len(set(tokens)) > 1
    assert max(tokens) < VOCAB


def test_a_chain_is_one_replay_for_each_power_of_two(lm: CausalLM) -> None:
    capturer = TapeCapturer()
    chained, _ = make_drafters(lm, capturer)
    num_captures = capturer.num_captures
    chained.open(0, sampling=Sampling(), num_prompt=1)
    replays = []
    node = 0
    tip: tuple[int, int] | None = None
    for num_ahead in (7, 3, 1, 5):  # chains of 8, 4, 2 and of 4 + 2
        before = capturer.num_replays
        if tip is None:
            result = step(chained, commit=(5,), num_ahead=num_ahead, first_node=node)
        else:
            row = NodeRow(node=tip[0], parent=tip[0] - 1, token=tip[1])
            result = step(
                chained, keep=frozenset(range(tip[0])), commit_start=1, nodes=(row,), num_ahead=num_ahead,
                first_node=node,
            )  # fmt: skip
        replays.append(capturer.num_replays - before)
        node += num_ahead + 1
        tip = node - 1, chain_of(result)[-1]
    assert replays == [1, 1, 1, 2]
    assert capturer.num_captures == num_captures


def test_a_chain_does_not_see_what_an_earlier_one_has_left_behind(lm: CausalLM) -> None:
    model = make_model(lm)
    tokens = [5, 9, 200]
    model.forward(0, tokens, num_committed=3)
    keys = [noise_key(1, position) for position in range(3, 11)]
    first = model.chain(0, 11, parent=2, keys=keys, temperature=0.7)
    model.rewind(0, 8)
    for slot in range(2):
        model.cache.fill(slot, model.rows[slot].used, model.cache.capacity, math.nan)
    assert model.chain(0, 11, parent=2, keys=keys, temperature=0.7) == first
    assert model.rows[0].used == 11
    # The rows that it leaves are right: a pass behind them scores as one over the text alone.
    after = model.forward(0, [17], parents=[10])
    text = [*tokens, 11, *first[0][:7], 17]
    fresh = make_model(lm).forward(0, text, num_committed=len(text), num_logits=1)
    assert (after - fresh).abs().max() <= 1e-5 * fresh.abs().max()


def test_a_chain_across_the_edge_of_a_segment_grows_the_cache(lm: CausalLM) -> None:
    chained, single = make_drafters(lm)
    prompt = tuple(4 + i % 290 for i in range(60))
    for drafter in (chained, single):
        drafter.open(1, sampling=SAMPLINGS[1], num_prompt=60)
    before = chained._model.num_captures
    result = step(chained, slot=1, commit=prompt, num_ahead=9, first_node=0)
    assert len(chained._model.cache.segments) == 2
    assert chained._model.num_captures > before
    expected = step(single, slot=1, commit=prompt)
    tokens = []
    for node in range(10):
        (child,) = expected.children[node - 1]
        tokens.append(child.token)
        row = NodeRow(node=node, parent=node - 1, token=child.token)
        expected = step(single, slot=1, keep=frozenset(range(node)), commit_start=60, nodes=(row,))
    assert chain_of(result) == tokens


def test_what_a_chain_cannot_choose_is_drafted_step_by_step(lm: CausalLM) -> None:
    """Penalties and filters need more than logits and noise: such a request gets its one child, and no chain."""
    chained, single = make_drafters(lm)
    sampling = Sampling(temperature=0.9, seed=4, repetition_penalty=1.3, top_p=0.9)
    for drafter in (chained, single):
        drafter.open(0, sampling=sampling, num_prompt=3)
    result = step(chained, commit=(5, 9, 200), num_ahead=5, first_node=0)
    assert list(result.children) == [-1]
    assert chain_of(result) == chain_of(step(single, commit=(5, 9, 200)))


def test_a_chain_that_does_not_fit_is_refused_and_changes_nothing(lm: CausalLM) -> None:
    chained, _ = make_drafters(lm)
    chained.open(0, sampling=Sampling(), num_prompt=3)
    with pytest.raises(CacheError, match="a chain of 25 more nodes does not fit"):
        step(chained, commit=(5, 9, 200), num_ahead=25, first_node=0)
    two = tuple(NodeRow(node=i, parent=-1, token=i) for i in range(2))
    with pytest.raises(CacheError, match="a chain starts at one row with one child, not at 2 nodes"):
        step(chained, commit=(5, 9, 200), expand_root=False, nodes=two, num_ahead=2, first_node=2)
    model = chained._model
    for _ in range(5):
        model.forward(1, [3] * 31, num_committed=31, num_logits=1)
    with pytest.raises(CacheError, match="beyond the limit of 160"):
        model.chain(1, 3, parent=154, keys=[1] * 8, temperature=0.0)
    assert model.rows[1].used == 155


def test_logits_that_are_not_numbers_end_the_session_and_not_the_drafter(lm: CausalLM) -> None:
    model = make_model(lm)
    model.forward(0, [5, 9], num_committed=2)
    model.cache.fill(0, 0, 2, math.nan)
    with pytest.raises(NumericalError, match="drafted chain"):
        model.chain(0, 11, parent=1, keys=[1, 2], temperature=0.0)
    assert model.rows[0].used == 2
    model.forward(1, [5, 9], num_committed=2)
    assert model.chain(1, 11, parent=1, keys=[1, 2], temperature=0.0)


def test_where_chains_cannot_be_captured_there_are_none(lm: CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    class NoNoise(TapeCapturer):
        """Captures passes, and nothing that adds noise."""

        def capture(self, fn: Any) -> Any:
            if "_steps" in fn.__qualname__:
                raise CannotCapture("no chains here")
            return super().capture(fn)

    model = make_model(lm, NoNoise())
    assert not model.has_chains
    assert model.num_captures > 0
    assert "chains are not captured" in caplog.text
    assert HFDrafter(model, vocab_size=VOCAB).max_ahead == 0
    assert make_drafters(lm)[1].max_ahead == 0


class Session:
    """A draft scheduler with its drafter, and the target that answers it: one that follows `text`."""

    def __init__(self, drafter: HFDrafter, growth: str, sampling: Sampling, prompt: tuple[int, ...]) -> None:
        self.drafter = drafter
        self.scheduler = DraftScheduler(
            growth=parse_growth(growth), num_slots=2, max_length=160, max_rows=24, max_ahead=drafter.max_ahead
        )
        self.length = len(prompt)
        self.num_calls = 0
        self.frames: list[Candidates] = []
        prefix = Prefix(
            session="s", epoch=1, start=0, tokens=prompt, total=len(prompt), digest=digest_ids(prompt), limit=150,
            prompt_tokens=len(prompt), sampling=sampling,
        )  # fmt: skip
        self.scheduler.on_prefix(prefix)
        self.drafter.open(self.scheduler.sessions["s"].slot, sampling=sampling, num_prompt=len(prompt))

    def work(self, late: tuple[int, ...] = ()) -> None:
        """Step until the policy has nothing to grow. `late` is committed while the first of the steps runs."""
        while True:
            planned, actions = self.scheduler.next_step(0.0)
            self._send(actions)
            if not planned:
                return
            (result,) = self.drafter.step(planned)
            assert isinstance(result, DraftResult), result
            self.num_calls += 1
            if late:
                self.commit(late)
                late = ()
            self._send(self.scheduler.on_step_done([result], 0.0))

    def commit(self, tokens: tuple[int, ...]) -> None:
        acceptance = Acceptance(session="s", epoch=1, start=self.length, tokens=tokens)
        self._send(self.scheduler.on_message(acceptance, 0.0))
        self.length += len(tokens)

    def tree(self) -> list[int]:
        """The tokens of the live chain."""
        tree = self.scheduler.sessions["s"].tree
        assert tree is not None
        return [node.token for node in sorted(tree.nodes.values(), key=lambda node: node.position)]

    def _send(self, actions: Any) -> None:
        self.frames += [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Candidates)]


@pytest.mark.parametrize("growth", ["chain:2+6", "chain:5+9"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_random_acceptances_find_the_same_drafts_with_and_without_chains(
    lm: CausalLM, growth: str, sampling: Sampling
) -> None:
    """Accepted in part or in full, rejected, and committed behind the drafter's back while a chain is being drafted."""
    rng = random.Random(8)
    sessions = [Session(drafter, growth, sampling, (5, 9, 200)) for drafter in make_drafters(lm)]
    for session in sessions:
        session.work()
    for _ in range(25):
        live = sessions[0].tree()
        assert live == sessions[1].tree()
        num_right = rng.randint(0, min(3, len(live)))
        tokens = (*live[:num_right], *([rng.randrange(VOCAB)] if num_right < len(live) else []))
        late: tuple[int, ...] = ()
        if rng.random() < 0.5:
            tokens, late = tokens[:1], (*tokens[1:], rng.randrange(VOCAB))
        for session in sessions:
            if tokens:
                session.commit(tokens)
            session.work(late)
    chained, single = sessions
    assert chained.num_calls < single.num_calls
    assert chained.length == single.length


@pytest.mark.parametrize("num_late", [1, 2, 5])
def test_what_is_committed_while_its_chain_is_drafted_needs_no_row_of_it(lm: CausalLM, num_late: int) -> None:
    """The chain's first nodes have passed when they arrive. Their rows are gone, and those behind them with them."""
    chained, single = (Session(drafter, "chain:6", Sampling(), (5, 9, 200)) for drafter in make_drafters(lm))
    single.work()
    expected = single.tree()
    single.commit(tuple(expected[:num_late]))
    single.work()
    chained.work(late=tuple(expected[:num_late]))
    for tokens in ((), (77,)):
        for session in (chained, single):
            if tokens:
                session.commit(tokens)
            session.work()
        assert len(chained.tree()) == 6
        assert chained.tree() == single.tree()


def test_a_frame_of_a_chain_is_drafted_in_one_call(lm: CausalLM) -> None:
    chained, single = (Session(drafter, "chain:4+8", Sampling(), (5, 9, 200)) for drafter in make_drafters(lm))
    for session in (chained, single):
        session.work()
    assert (chained.num_calls, single.num_calls) == (3, 12)
    assert [len(frame.tokens) for frame in chained.frames] == [4, 4, 4]
    sent = [[token for frame in session.frames for token in frame.tokens] for session in (chained, single)]
    assert sent[0] == sent[1]


@pytest.mark.gpu
def test_a_chain_on_a_gpu_is_what_single_steps_draft(tiny: Any) -> None:
    from engine.capturer import CudaCapturer
    from engine.checkpoint import Checkpoint

    torch.backends.cuda.matmul.allow_tf32 = False
    lm = Checkpoint(str(tiny("llama"))).load(device="cuda")
    for sampling in SAMPLINGS:
        chained = HFDrafter(make_model(lm, CudaCapturer(lm.device)), vocab_size=VOCAB)
        single = HFDrafter(make_model(lm, CudaCapturer(lm.device)), vocab_size=VOCAB)
        for drafter in (chained, single):
            drafter.open(0, sampling=sampling, num_prompt=3)
        result = step(chained, commit=(5, 9, 200), num_ahead=7, first_node=0)
        assert chain_of(result) == one_at_a_time(single, (5, 9, 200), 8)[0]
