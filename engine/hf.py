"""All contact with transformers.

Supported are 5.19 to 5.24 (`scripts/check_transformers.sh VERSION` runs the tests against one). What changed between
them and is hidden here: the models' `past_key_values` argument became `cache` (5.24); layers are updated with
positional extras or `kwargs=`; `cache_position` is gone. A 4-D attention mask is used as given by all of them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from engine.cache import KVCache, LayerShape
from engine.errors import CheckpointError
from engine.lean import LeanForward, supported


class Window:
    """Which rows of which slot the next forward writes and sees. Shared by all layers of a cache."""

    def __init__(self) -> None:
        self.slot = 0
        self.rows = torch.empty(0, dtype=torch.long)  # [n], where the new rows go
        self.length = 0  # rows 0..length-1 are seen


class FixedLayer(CacheLayerMixin):
    """One layer's storage, as transformers wants to see it. Writes in place, returns views."""

    is_sliding = False
    is_compileable = True
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys  # [num_slots, kv_heads, capacity, key_dim]
        self.values = values
        self.window = window
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new rows, [1, kv_heads, n, dim], and return views of the rows seen, [1, kv_heads, length, dim]."""
        slot, rows, length = self.window.slot, self.window.rows, self.window.length
        self.keys[slot].index_copy_(1, rows, key_states[0])
        self.values[slot].index_copy_(1, rows, value_states[0])
        return self.keys[slot : slot + 1, :, :length], self.values[slot : slot + 1, :, :length]

    def get_seq_length(self) -> int:
        return self.window.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.length, 0


class _ProbeLayer(FixedLayer):
    """Notes the shapes of what a layer stores."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0), torch.empty(0), Window())
        self.shape: LayerShape | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.shape = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_max_length(self) -> int:
        return 1


class Attached:
    """A model's storage as transformers' cache object and as plain tensors, and the window to set before each call."""

    def __init__(self, storage: KVCache) -> None:
        self.window = Window()
        pairs = list(zip(storage.keys, storage.values, strict=True))
        self.hf = Cache(layers=[FixedLayer(keys, values, self.window) for keys, values in pairs])
        # Of each slot the keys and the values of each layer, [kv_heads, capacity, dim].
        self.slots = [
            ([keys[slot] for keys, _ in pairs], [values[slot] for _, values in pairs])
            for slot in range(storage.num_slots)
        ]


class CausalLM:
    """A loaded model and the one way it is called here.

    Args:
        lean: use our own forward where the model is of a kind it knows (`engine/lean.py`).
        int8: with int8 weights; for drafters, and only where the lean forward serves.
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
        self._ids: Tensor | None = None  # of a reduced head: the token id of each of its rows
        self._width = 0
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.layers = self._probe()

    def attach(self, storage: KVCache) -> Attached:
        """The storage in the form that `forward` takes."""
        if self._lean is not None:
            self._lean.reserve(storage.capacity)
        return Attached(storage)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, attached: Attached, *, num_logits: int
    ) -> Tensor:
        """One pass over n new rows.

        Args:
            tokens, positions: [1, n], long.
            mask: [1, 1, n, length], bool, True where a row sees a cached row.
            attached: from `attach`, its window set.
            num_logits: logits are wanted of this many last rows, at least 1.

        Returns:
            [num_logits, width], in the model's dtype; width may exceed the number of token ids.
        """
        if self._lean is not None:
            keys, values = attached.slots[attached.window.slot]
            logits = self._lean(tokens[0], positions[0], mask[0, 0], keys, values, num_logits=num_logits)
        else:
            logits = self._forward_hf(tokens, positions, mask, attached.hf, num_logits=num_logits)
        return self._widened(logits)

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
        wide = logits.new_full((logits.shape[0], self._width), float("-inf"))
        return wide.index_copy_(1, self._ids, logits)

    def reduce_head(self, ids: Tensor) -> None:
        """Keep only these rows of the head, ids ascending; logits of the other tokens are -inf from now on."""
        weight = self.model.get_output_embeddings().weight
        head = torch.nn.Linear(weight.shape[1], len(ids), bias=False, dtype=weight.dtype, device=weight.device)
        head.weight = torch.nn.Parameter(weight[ids.to(weight.device)].clone(), requires_grad=False)
        self._ids, self._width = ids.to(weight.device), weight.shape[0]
        self.model.set_output_embeddings(head)
        if self._lean is not None:
            self._lean.set_head(head.weight)

    def _forward_hf(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any, *, num_logits: int) -> Tensor:
        wanted = {"logits_to_keep": num_logits} if self._keeps_logits else {}
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

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """Shapes of what each layer caches, found by running one token."""
        name = type(self.model).__name__
        layers = [_ProbeLayer() for _ in range(self.model.config.get_text_config().num_hidden_layers)]
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        try:
            self._forward_hf(one, one, mask, Cache(layers=[*layers]), num_logits=1)
        except Exception as exc:  # whatever its layers raise when they want another kind of cache
            raise CheckpointError(f"{name} cannot be served on a plain key-value cache: {exc!r}") from exc
        shapes = [layer.shape for layer in layers]
        for i, shape in enumerate(shapes):
            if shape is None:
                raise CheckpointError(
                    f"{name} cannot be served: layer {i} has no keys and values of its own (recurrent or shared), "
                    "so a rejected draft could not be rewound"
                )
        return [shape for shape in shapes if shape is not None]


def load_config(directory: Path) -> Any:
    """The checkpoint's config, refused if it names no causal LM that can be served here."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as exc:
        raise CheckpointError(f"cannot read the config of {directory}: {first_line(exc)}") from exc
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    causal = {known} if isinstance(known, str) else set(known or ())
    architectures = set(config.architectures or causal)
    if config.is_encoder_decoder or not causal or not architectures & causal:
        raise CheckpointError(
            f"{directory} is not a causal language model "
            f"({', '.join(sorted(architectures)) or config.model_type}); give a ...ForCausalLM checkpoint"
        )
    return config


def refuse_windows(config: Any, max_length: int, name: str) -> None:
    """Refuse layers whose cache forgets: a rejected draft could not be rewound.

    A sliding window is fine while no session outgrows it.

    Raises:
        CheckpointError: naming the kind of layer and what would help.
    """
    text = config.get_text_config()
    # Configs of architectures without a choice of layers (Mistral) only carry the window.
    default = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = set(getattr(text, "layer_types", None) or [default])
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
    for kind in sorted(kinds - {"full_attention"}):
        if kind not in ("sliding_attention", "chunked_attention"):
            raise CheckpointError(
                f"{name} has {kind} layers: their state cannot be rewound after a rejected draft, so it is refused"
            )
        if window < max_length:
            raise CheckpointError(
                f"{name} has {kind} layers with a window of {window}: a cache that has wrapped cannot be rewound. "
                f"Set the maximum length to {window} or less (it is {max_length})"
            )


def load_model(
    directory: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: str,
    num_layers: int | None,
    graft: Graft | None = None,
    int8: bool = False,
) -> CausalLM:
    """Load the weights, of the first `num_layers` layers only if given.

    Args:
        graft: trained layers to put in, see `engine/distilled.py`.
        int8: quantize them; for drafters.

    Raises:
        CheckpointError: with the reason in one line.
    """
    text = config.get_text_config()
    if num_layers is not None:
        if not 1 <= num_layers <= text.num_hidden_layers:
            raise CheckpointError(f"layers must be in 1..{text.num_hidden_layers} for {directory}, got {num_layers}")
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_layers]
        text.num_hidden_layers = num_layers
    auto: Any = AutoModelForCausalLM  # its return type depends on output_loading_info
    try:
        with quiet():
            model, loading = auto.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as exc:
        raise CheckpointError(f"cannot load the weights of {directory}: {first_line(exc)}") from exc
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise CheckpointError(f"{directory} lacks {len(missing)} weights of its model, for example {missing[0]}")
    if getattr(model, "_is_stateful", False):
        raise CheckpointError(f"{type(model).__name__} keeps a recurrent state, which cannot be rewound; it is refused")
    model.requires_grad_(False)
    if graft is not None:
        graft.apply(model)
    lm = CausalLM(model.to(device).eval(), int8=int8)
    if graft is not None:
        lm.reduce_head(graft.ids)
    return lm


@dataclass(frozen=True, slots=True, kw_only=True)
class Graft:
    """What a distilled drafter changes in its target.

    Attributes:
        tensors: `layers.I.NAME` for I = 0.. (counted from first_layer), and `norm.weight`.
        ids: target ids that the head keeps, ascending.
    """

    tensors: dict[str, Tensor]
    first_layer: int
    ids: Tensor

    def apply(self, model: Any) -> None:
        """Replace the layers from `first_layer` on, and the final norm.

        Raises:
            CheckpointError: names or shapes are not those of the model.
        """
        base = model.base_model
        own = dict(base.named_parameters())
        with torch.no_grad():
            for name, value in self.tensors.items():
                place = name
                if name.startswith("layers."):
                    _, number, rest = name.split(".", 2)
                    place = f"layers.{self.first_layer + int(number)}.{rest}"
                if place not in own or own[place].shape != value.shape:
                    raise CheckpointError(f"{name} of shape {tuple(value.shape)} has no place in {type(base).__name__}")
                own[place].copy_(value)


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's own fast tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory} has no tokenizer.json; save one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as exc:
        raise CheckpointError(f"cannot load the tokenizer of {directory}: {first_line(exc)}") from exc


def end_tokens(directory: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The union of the end tokens that tokenizer, config and generation config name, ascending."""
    sources = [getattr(tokenizer, "eos_token_id", None), getattr(config.get_text_config(), "eos_token_id", None)]
    if (directory / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(directory).eos_token_id)
    found: set[int] = set()
    for source in sources:
        found.update(source if isinstance(source, Sequence) else [] if source is None else [source])
    return tuple(sorted(found))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no reports from transformers: what matters is raised, or logged by us."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def first_line(exc: Exception) -> str:
    """The start of a long message, for an error of one line."""
    text = str(exc).strip() or type(exc).__name__
    return text.splitlines()[0][:300]
