"""Recording what a function does to tensors at fixed addresses, to do it again without running the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Replay = Callable[[], None]
WARM_UPS = 2


class CannotCapture(RuntimeError):
    """The function does what a captured graph cannot repeat."""


class Capturer(Protocol):
    """Turns a function without arguments, which reads and writes tensors that stay where they are, into its replay."""

    def capture(self, fn: Callable[[], None]) -> Replay:
        """Run `fn` to warm up, then record it.

        A replay repeats the operations of the recorded run on the memory they were recorded on. Python is not run
        again: a number or an object that `fn` has read stays what it was.
        """
        ...


class Uncaptured:
    """No capture: a replay runs the function."""

    def capture(self, fn: Callable[[], None]) -> Replay:
        return fn


class CudaCapturer:
    """CUDA graphs. All share one pool of memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[[], None]) -> Replay:
        # Warming up beside the stream in use, as the documentation of CUDA graphs asks: what libraries allocate and
        # choose at their first call must not become part of the graph.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                fn()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a tokenizer's, the loop's) may call CUDA meanwhile without spoiling the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            fn()
        replay: Replay = graph.replay
        return replay


class TapeCapturer:
    """A graph's double for machines without a GPU: records operations of the dispatcher and repeats them.

    Like a graph it keeps every Python value of the recorded run, reads and writes the memory of that run, and refuses
    functions that wait for a result. It is slow, and keeps all that was allocated between.

    Attributes:
        num_captures: how often something was recorded.
        num_replays: how often something was repeated.
    """

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, fn: Callable[[], None]) -> Replay:
        for _ in range(WARM_UPS):
            fn()
        tape = _Tape()
        with tape:
            fn()
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of one run, with the tensors they were called with and gave."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.item", "aten.equal", "aten.unique")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith(self.WAITS):
            raise CannotCapture(f"{func} waits for a result of the model")
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        owners = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        # Views need not be made again. What was changed in place is in the caller's hands already.
        new = [out for out in outputs if out.untyped_storage().data_ptr() not in owners]
        if new or func._schema.is_mutable:
            self._calls.append((func, args, kwargs, [] if func._schema.is_mutable else outputs))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            again = _tensors(func(*args, **kwargs))
            if outputs:
                for old, new in zip(outputs, again, strict=True):
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
