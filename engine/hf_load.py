"""Checkpoints through transformers: config, weights, tokenizer, end tokens. Its errors become `CheckpointError`s."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from engine.errors import CheckpointError
from engine.hf import CausalLM


def load_config(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's config, refused if it names no causal LM that can be served here.

    Args:
        trust_remote_code: run code that came with the checkpoint, if transformers does not know its architecture.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as exc:
        if not trust_remote_code and has_own_code(directory):
            raise CheckpointError(
                f"{directory} brings Python code of its own, which is not run: read it, then give --trust-remote-code"
            ) from exc
        raise CheckpointError(f"cannot read the config of {directory}: {first_line(exc)}") from exc
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return config
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    causal = {known} if isinstance(known, str) else set(known or ())
    architectures = set(config.architectures or causal)
    if config.is_encoder_decoder or not causal or not architectures & causal:
        raise CheckpointError(
            f"{directory} is not a causal language model "
            f"({', '.join(sorted(architectures)) or config.model_type}); give a ...ForCausalLM checkpoint"
        )
    return config


def has_own_code(directory: Path) -> bool:
    """Whether the checkpoint's config points to code that came with it."""
    raw = json.loads((directory / "config.json").read_text("utf-8"))
    return isinstance(raw, dict) and bool(raw.get("auto_map"))


def refuse_layers(config: Any, max_length: int, name: str) -> None:
    """Refuse layers that keep more, or less, than keys and values of each token: a rejected draft is rewound by
    forgetting its rows, which undoes nothing in a state that has absorbed them.

    Layers with a sliding window are served: the cache keeps all rows and the mask hides what the window has left.

    Raises:
        CheckpointError: naming the kind of layer and what would help. Of the weights nothing was read.
    """
    text = config.get_text_config()
    for kind in sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        if kind != "chunked_attention":
            raise CheckpointError(
                f"{name} has {kind} layers: their state cannot be rewound after a rejected draft, so it is refused"
            )
        chunk = getattr(text, "attention_chunk_size", None) or 0
        if chunk < max_length:
            raise CheckpointError(
                f"{name} has {kind} layers of {chunk} tokens, whose masks are not made here. "
                f"Set the maximum length to {chunk} or less (it is {max_length})"
            )
    # The mapping imports only the classes of this architecture; it does not know a checkpoint's own code.
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    _refuse_state(model_class, name)
    _refuse_long_rope(text, max_length, name)


def _refuse_long_rope(text: Any, max_length: int, name: str) -> None:
    """transformers chooses between the two sets of factors by the last position of a whole pass: beyond the first set's
    reach, a candidate would change the tokens before it, and one session those of the others in its pass."""
    rope = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        reach = each.get("original_max_position_embeddings") or 0
        if each.get("rope_type") == "longrope" and max_length > reach:
            raise CheckpointError(
                f"{name} has other rotary factors (longrope) beyond {reach} tokens, which one pass "
                f"cannot tell apart. Set the maximum length to {reach} or less (it is {max_length})"
            )


def _refuse_state(model_class: Any, name: str) -> None:
    if getattr(model_class, "_is_stateful", False):
        raise CheckpointError(
            f"{name} keeps a recurrent state ({model_class.__name__}), which cannot be rewound after a rejected "
            "draft; it is refused"
        )


def attention_for(config: Any) -> str:
    """Which of transformers' attentions computes what the model means: "sdpa", or "eager" where that leaves out a
    cap on the scores or attention sinks.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"


def load_model(
    directory: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: str,
    num_layers: int | None,
    graft: Graft | None = None,
    int8: bool = False,
    device_map: str = "",
    trust_remote_code: bool = False,
) -> CausalLM:
    """Load the weights, of the first `num_layers` layers only if given.

    Args:
        graft: trained layers to put in, see `engine/distilled.py`.
        int8: quantize them; for drafters.
        device_map: transformers' own ("auto", "balanced", ...), to spread the layers; `device` is ignored then.

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
    if device_map and find_spec("accelerate") is None:
        raise CheckpointError(f"--device-map {device_map} needs the package accelerate: pip install accelerate")
    auto: Any = AutoModelForCausalLM  # its return type depends on output_loading_info
    try:
        with quiet():
            model, loading = auto.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=attention_for(config),
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"device_map": device_map} if device_map else {}),
            )
    except Exception as exc:
        raise CheckpointError(f"cannot load the weights of {directory}: {first_line(exc)}") from exc
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise CheckpointError(f"{directory} lacks {len(missing)} weights of its model, for example {missing[0]}")
    _refuse_state(type(model), directory.name)
    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise CheckpointError(f"{directory} does not fit into the memory here: with --device-map {device_map} layers "
                              "would be read from disk in each pass")  # fmt: skip
    model.requires_grad_(False)
    if graft is not None:
        graft.apply(model)
    lm = CausalLM((model if device_map else model.to(device)).eval(), int8=int8)
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


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's own fast tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory} has no tokenizer.json; save one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
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
