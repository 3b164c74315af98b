"""How a model of transformers is called: its cache object over our storage, its forward, its logits.

Supported are 5.19 to 5.24 (`scripts/check_transformers.sh VERSION` runs the tests against one). What changed between
them and is hidden here: the models' `past_key_values` argument became `cache` (5.24); layers are updated with
positional extras or `kwargs=`; `cache_position` is gone. A 4-D attention mask is used as given by all of them.
`engine/hf_load.py` has the rest of the contact with transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.cache import LayerShape
from engine.errors import CheckpointError
from engine.lean import LeanForward, Part, supported
from engine.window import Pair, SlotWindow, Window


class FixedLayer(CacheLayerMixin):
    """One layer's storage, as transformers wants to see it: stores the new rows, returns the rows that are seen."""

    is_sliding = False
    is_compileable = True

    def __init__(self, layer: int, attached: Attached) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.attached = attached
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new rows, [1, kv_heads, n, dim], and return the rows seen, [1, kv_heads, length, dim]."""
        keys, values = self.attached.window.exchange(self.layer, key_states[0], value_states[0])
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        return self.attached.window.length

    def get_max_length(self) -> int:
        return self.attached.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attached.window.length, 0


class _Nowhere:
    """The window of a model that is only probed."""

    length = 0

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


class _ProbeLayer(FixedLayer):
    """Notes the shapes of what a layer stores."""

    def __init__(self, layer: int) -> None:
        super().__init__(layer, Attached(_Nowhere(), num_layers=0, capacity=1))
        self.shape: LayerShape | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shape = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        self.shape = LayerShape(*shape, device=key_states.device)
        return key_states, value_states


class Attached:
    """A cache as transformers' object, and the window that says what the next pass does with it."""

    def __init__(self, window: Window, *, num_layers: int, capacity: int) -> None:
        self.window = window
        self.capacity = capacity
        self.hf = Cache(layers=[FixedLayer(layer, self) for layer in range(num_layers)]) if num_layers else None


@dataclass(frozen=True, slots=True)
class Masks:
    """Which cached rows the new rows see: bool [1, 1, n, length], True where a row sees another.

    Attributes:
        full: of layers that see everything before.
        sliding: of layers with a sliding window; None if there are none, or none that is outgrown.
    """

    full: Tensor
    sliding: Tensor | None = None


class CausalLM:
    """A loaded model and the one way it is called here.

    Args:
        lean: use our own forward where the model is of a kind it knows (`engine/lean.py`).
        int8: with int8 weights; for drafters, and only where the lean forward serves.

    Attributes:
        device: where inputs go; layers may lie elsewhere.
        width, logits_device: of a row of logits.
        sliding_window: positions that a sliding layer sees; 0 without such layers.
    """

    def __init__(self, model: Any, *, lean: bool = True, int8: bool = False) -> None:
        self.model = model
        self.int8 = int8
        self._lean = LeanForward(model, int8=int8) if lean and supported(model) else None
        if int8 and self._lean is None:
            raise CheckpointError(f"{type(model).__name__} cannot be run with int8 weights here; choose another dtype")
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        missing = {"position_ids", "attention_mask", self._cache_name} - set(parameters)
        if missing:
            raise CheckpointError(f"{type(model).__name__} takes no {', '.join(sorted(missing))}: it cannot be served")
        self._keeps_logits = "logits_to_keep" in parameters
        # Eager attention adds the mask to the scores.
        self._adds_masks = model.config.get_text_config()._attn_implementation == "eager"
        self._ids: Tensor | None = None  # of a reduced head: the token id of each of its rows
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        self.width = 0
        self.logits_device = self.device
        self.sliding_window, self._is_mixed = sliding_layers(model.config.get_text_config())
        self.layers = self._probe()

    @property
    def is_lean(self) -> bool:
        """Whether our own forward runs it, which takes a `SlotWindow`."""
        return self._lean is not None

    def attach(self, window: Window, capacity: int) -> Attached:
        """The form of a cache that `forward` takes."""
        return Attached(window, num_layers=len(self.layers), capacity=capacity)

    def forward(
        self, tokens: Tensor, positions: Tensor, masks: Masks, attached: Attached, *, num_logits: int
    ) -> Tensor:
        """One pass over n new rows.

        Args:
            tokens, positions: [1, n], long.
            attached: from `attach`, its window set.
            num_logits: logits are wanted of this many last rows, at least 1.

        Returns:
            [num_logits, width], in the model's dtype; width may exceed the number of token ids.
        """
        window = attached.window
        if self._lean is not None and isinstance(window, SlotWindow):
            mask = (masks.full if masks.sliding is None else masks.sliding)[0, 0]
            return self.forward_slots(tokens, positions, [(window.slots[window.slot], mask, num_logits)])
        return self._widened(self._forward_hf(tokens, positions, masks, attached.hf, num_logits=num_logits))

    def forward_slots(
        self, tokens: Tensor, positions: Tensor, parts: Sequence[tuple[list[Pair], Tensor, int]]
    ) -> Tensor:
        """One pass of our own forward over new rows of several slots, those of each behind one another.

        Args:
            tokens, positions: [1, n], long.
            parts: of each slot its keys and values in each layer, its mask [new rows, rows seen], and of how many of
                its last rows logits are wanted.

        Returns:
            [sum of those, width], in the model's dtype.
        """
        assert self._lean is not None
        self._lean.reserve(max(mask.shape[1] for _, mask, _ in parts))
        lean_parts = [
            Part(mask, [keys for keys, _ in pairs], [values for _, values in pairs], num_logits)
            for pairs, mask, num_logits in parts
        ]
        return self._widened(self._lean(tokens[0], positions[0], lean_parts))

    @torch.inference_mode()
    def without_cache(self, tokens: Sequence[int]) -> Tensor | None:
        """Logits [1, width] behind `tokens` by transformers' own forward, with no cache and no mask of ours.

        None for int8 weights, which transformers does not have.
        """
        if self.int8:
            return None
        ids = torch.tensor([list(tokens)], device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return self._widened(logits[0, -1:]).float()

    def _widened(self, logits: Tensor) -> Tensor:
        """Logits of a reduced head at the whole width."""
        if self._ids is None:
            return logits
        wide = logits.new_full((logits.shape[0], self.width), float("-inf"))
        return wide.index_copy_(1, self._ids, logits)

    def reduce_head(self, ids: Tensor) -> None:
        """Keep only these rows of the head, ids ascending; logits of the other tokens are -inf from now on."""
        weight = self.model.get_output_embeddings().weight
        head = torch.nn.Linear(weight.shape[1], len(ids), bias=False, dtype=weight.dtype, device=weight.device)
        head.weight = torch.nn.Parameter(weight[ids.to(weight.device)].clone(), requires_grad=False)
        self._ids = ids.to(weight.device)
        self.model.set_output_embeddings(head)
        if self._lean is not None:
            self._lean.set_head(head.weight)

    def _forward_hf(self, tokens: Tensor, positions: Tensor, masks: Masks, cache: Any, *, num_logits: int) -> Tensor:
        wanted = {"logits_to_keep": num_logits} if self._keeps_logits else {}
        full, sliding = (self._mask(mask) for mask in (masks.full, masks.sliding))
        mask: Any = full if sliding is None else sliding
        if sliding is not None and self._is_mixed:
            mask = {"full_attention": full, "sliding_attention": sliding}
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: cache},
            **wanted,
        )
        logits: Tensor = output.logits
        return logits[0, -num_logits:]

    def _mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask as the model's attention wants it."""
        if mask is None or not self._adds_masks:
            return mask
        unseen = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return unseen.masked_fill(~mask, torch.finfo(self.dtype).min)

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """Shapes of what each layer caches, found by running one token; notes width and place of the logits."""
        name = type(self.model).__name__
        layers = [_ProbeLayer(i) for i in range(self.model.config.get_text_config().num_hidden_layers)]
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        mask = Masks(seen, seen if self.sliding_window else None)
        try:
            logits = self._forward_hf(one, one, mask, Cache(layers=[*layers]), num_logits=1)
        except Exception as exc:  # whatever its layers raise when they want another kind of cache
            raise CheckpointError(f"{name} cannot be served on a plain key-value cache: {exc!r}") from exc
        self.width, self.logits_device = logits.shape[-1], logits.device
        shapes = [layer.shape for layer in layers]
        for i, shape in enumerate(shapes):
            if shape is None:
                raise CheckpointError(
                    f"{name} cannot be served: layer {i} has no keys and values of its own (recurrent or shared), "
                    "so a rejected draft could not be rewound"
                )
        return [shape for shape in shapes if shape is not None]


def sliding_layers(text_config: Any) -> tuple[int, bool]:
    """(window, mixed): positions that sliding layers see, 0 without any; whether other layers see everything."""
    window = getattr(text_config, "sliding_window", None) or 0
    # Configs of architectures without a choice of layers (Mistral) only carry the window.
    kinds = set(getattr(text_config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if "sliding_attention" not in kinds:
        return 0, False
    return window, len(kinds) > 1
