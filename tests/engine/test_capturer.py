"""The double of a captured graph behaves as a graph does, so that what the other tests find with it means something."""

from __future__ import annotations

import pytest
import torch

from engine.capturer import CannotCapture, CudaCapturer, TapeCapturer, Uncaptured


def test_a_replay_reads_what_the_inputs_hold_now_and_writes_where_it_wrote() -> None:
    capturer = TapeCapturer()
    source, result = torch.arange(4.0), torch.zeros(4)

    def fn() -> None:
        result.copy_((source * 2).view(2, 2).t().reshape(4) + torch.ones(4))

    replay = capturer.capture(fn)
    place = result.data_ptr()
    source.fill_(5.0)
    replay()
    assert result.tolist() == [11.0] * 4
    assert result.data_ptr() == place
    assert (capturer.num_captures, capturer.num_replays) == (1, 1)


def test_python_values_and_replaced_tensors_stay_what_they_were_at_the_capture() -> None:
    """This is how a stale input shows: a graph does not notice that Python has changed its mind."""
    state = {"factor": 2.0, "input": torch.ones(1)}
    result = torch.zeros(1)
    calls = []

    def fn() -> None:
        calls.append(1)
        result.copy_(state["input"] * state["factor"])

    replay = TapeCapturer().capture(fn)
    num_calls = len(calls)
    state["factor"], state["input"] = 7.0, torch.full((1,), 100.0)
    replay()
    assert result.item() == 2.0
    assert len(calls) == num_calls == 3  # two to warm up, one recorded


def test_in_place_changes_of_what_lies_between_are_repeated() -> None:
    source, storage, result = torch.tensor([1.0]), torch.zeros(3), torch.zeros(1)
    place = torch.tensor([0])

    def fn() -> None:
        storage.index_copy_(0, place, source)
        between = storage + 0.0
        between.mul_(10.0)
        result.copy_(between.sum().reshape(1))

    replay = TapeCapturer().capture(fn)
    source[0], place[0] = 2.0, 2
    replay()
    assert storage.tolist() == [1.0, 0.0, 2.0]
    assert result.item() == 30.0


@pytest.mark.parametrize("wait", [lambda t: float(t[0]), lambda t: t.nonzero(), lambda t: bool((t > 0).all())])
def test_waiting_for_a_result_cannot_be_captured(wait: object) -> None:
    with pytest.raises(CannotCapture, match="waits for a result"):
        TapeCapturer().capture(lambda: wait(torch.ones(2)))  # type: ignore[operator]


def test_without_capture_a_replay_runs_the_function() -> None:
    calls = []
    replay = Uncaptured().capture(lambda: calls.append(1))
    assert not calls
    replay()
    replay()
    assert len(calls) == 2


@pytest.mark.gpu
def test_a_cuda_graph_behaves_as_its_double() -> None:
    device = torch.device("cuda")
    state = {"factor": 2.0}
    source, result = torch.ones(4, device=device), torch.zeros(4, device=device)

    def fn() -> None:
        result.copy_(source * state["factor"])

    replay = CudaCapturer(device).capture(fn)
    state["factor"] = 7.0
    source.fill_(5.0)
    replay()
    assert result.tolist() == [10.0] * 4
