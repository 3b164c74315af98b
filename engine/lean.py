"""A leaner eager forward for Llama-shaped models on a CPU: the same weights, fewer and larger operations.

transformers runs a layer in some forty operations; at one row most of them cost their dispatch. Here the projections
of queries, keys and values are one matrix, those of the feed-forward's gate and up another; rotary factors come from
a table; attention groups the query heads that share a key head into one batched product instead of repeating keys.
Weights are stored once: the model's own parameters become views of the joined ones.

Which models: `supported` asks for the module structure of Llama (Llama, SmolLM2, Qwen 2/2.5, Mistral): RMS norms,
optional biases of the projections, full rotary embedding of default type, SiLU gate. Everything else keeps
transformers' own forward. The two are held to the same logits by `tests/engine/test_lean.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.products import Dense, Int8, Product

MODEL_TYPES = {"llama", "qwen2", "mistral"}


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights, joined. H query heads, K key heads, D the head's size."""

    input_norm: Tensor  # [hidden]
    qkv: Product  # hidden -> (H + 2 K) D
    out: Product  # H D -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: Product  # hidden -> 2 inner
    down: Product  # inner -> hidden


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a pass that belong to one slot: n new rows, the last of the `length` that they see.

    Attributes:
        mask: [n, length], bool, True where a row sees a cached row.
        keys, values: of each layer, the slot's storage [K, capacity, D]; new rows are written in place.
        num_logits: logits are wanted of so many last rows.
    """

    mask: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    num_logits: int


def supported(model: Any) -> bool:
    """Whether `LeanForward` computes what this transformers model does."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return bool(
        config.model_type in MODEL_TYPES
        and rope.get("rope_type", "default") == "default"
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        # Layers that see differently need masks of their own.
        and len(set(getattr(config, "layer_types", None) or ["full_attention"])) == 1
        and model.device.type == "cpu"
        and all(hasattr(layer, "self_attn") and hasattr(layer.mlp, "gate_proj") for layer in model.base_model.layers)
    )


class LeanForward:
    """The forward of a supported model over fixed-address storage.

    Args:
        model: a transformers causal LM; its projection weights are replaced by views of joined ones.
        int8: multiply with weights quantized to int8 (a drafter only; the model must be bfloat16).
    """

    def __init__(self, model: Any, *, int8: bool = False) -> None:
        base = model.base_model
        config = model.config
        attention = base.layers[0].self_attn
        self.head_dim = int(attention.head_dim)
        self.num_heads = int(attention.q_proj.weight.shape[0]) // self.head_dim
        self.num_kv_heads = int(attention.k_proj.weight.shape[0]) // self.head_dim
        self.group = self.num_heads // self.num_kv_heads
        self.scale: float = attention.scaling
        self.eps: float = config.rms_norm_eps
        self._eps = torch.tensor([[self.eps]])
        self.embeddings: Tensor = base.embed_tokens.weight
        self._product: type[Dense] | type[Int8] = Int8 if int8 else Dense
        self.layers = [self._join(layer) for layer in base.layers]
        self.norm: Tensor = base.norm.weight
        self.set_head(model.get_output_embeddings().weight)
        self._rotary = base.rotary_emb
        self._cos = self._sin = torch.empty(0)

    def reserve(self, num_positions: int) -> None:
        """Have rotary factors for positions 0..num_positions-1."""
        if num_positions <= self._cos.shape[0]:
            return
        # A power of two, so that a growing session seldom comes here.
        num_positions = 1 << max(9, (num_positions - 1).bit_length())
        probe = torch.zeros(1, 1, 1, dtype=self.embeddings.dtype)
        cos, sin = self._rotary(probe, torch.arange(num_positions)[None])
        half = self.head_dim // 2
        self._cos = cos[0, :, None, :].contiguous()  # [positions, 1, D]
        # The first half is subtracted: rotate_half(x) = (-x2, x1).
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None, :].contiguous()

    def __call__(self, tokens: Tensor, positions: Tensor, parts: Sequence[Part]) -> Tensor:
        """One pass over n new rows, those of one slot behind those of another.

        Weights are read once for all rows; only attention runs slot by slot, over the slot's own rows.

        Args:
            tokens, positions: [n], long.
            parts: in the order of the rows.

        Returns:
            Logits of the rows that each part wants, [sum of num_logits, rows of the head], in the model's dtype.
        """
        n = len(tokens)
        heads, kv, dim = self.num_heads, self.num_kv_heads, self.head_dim
        hidden = self.embeddings[tokens]  # [n, hidden]
        cos, sin = self._cos[positions], self._sin[positions]  # [n, 1, D]
        unseen = [self._unseen(part.mask, hidden.dtype) for part in parts]
        ends = list(accumulate(part.mask.shape[0] for part in parts))
        half = dim // 2
        for number, layer in enumerate(self.layers):
            normed = self._rms_norm(hidden, layer.input_norm)
            qkv = layer.qkv(normed).view(n, heads + 2 * kv, dim)
            to_turn = qkv[:, : heads + kv]
            turned = to_turn * cos
            turned[..., :half].addcmul_(to_turn[..., half:], sin[..., :half])
            turned[..., half:].addcmul_(to_turn[..., :half], sin[..., half:])
            mixed = [
                self._attend(
                    turned[end - part.mask.shape[0] : end], qkv[end - part.mask.shape[0] : end, heads + kv :],
                    added, part.keys[number], part.values[number], part.mask.shape[1],
                )
                for part, added, end in zip(parts, unseen, ends, strict=True)
            ]  # fmt: skip
            hidden = hidden + layer.out(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
            normed = self._rms_norm(hidden, layer.post_norm)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        wanted = [hidden[end - part.num_logits : end] for part, end in zip(parts, ends, strict=True)]
        return self.head(self._rms_norm(wanted[0] if len(wanted) == 1 else torch.cat(wanted), self.norm))

    def _unseen(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to a part's scores, [group n, length].

        A key head's query heads lie behind one another: row (g, i) of a group is query head g of new row i.
        """
        n, length = mask.shape
        unseen = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
        return unseen.expand(self.group, n, length).reshape(self.group * n, length)

    def _attend(
        self, turned: Tensor, new_values: Tensor, unseen: Tensor, keys: Tensor, values: Tensor, length: int
    ) -> Tensor:
        """Store a part's new rows in one layer and let them look at the slot.

        Args:
            turned: [n, H + K, D], queries and keys of the new rows, rotated; new_values: [n, K, D].
            unseen: [group n, length], from `_unseen`.

        Returns:
            [n, H D].
        """
        heads, kv, dim, group = self.num_heads, self.num_kv_heads, self.head_dim, self.group
        n = turned.shape[0]
        keys[:, length - n : length] = turned[:, heads:].transpose(0, 1)
        values[:, length - n : length] = new_values.transpose(0, 1)
        queries = turned[:, :heads].view(n, kv, group, dim).permute(1, 2, 0, 3).reshape(kv, group * n, dim)
        scores = torch.baddbmm(
            unseen, queries, keys[:, :length].transpose(1, 2), alpha=self.scale
        )  # [K, group n, length]
        mixed = torch.bmm(scores.softmax(-1), values[:, :length])
        return mixed.view(kv, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)

    def set_head(self, weight: Tensor) -> None:
        """Use these rows, [rows, hidden], as the head."""
        self.head: Product = self._product(weight.detach())

    def _join(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        out_bias = None if attention.o_proj.bias is None else attention.o_proj.bias.detach()
        return Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=self._product(_joined(projections), torch.cat(biases) if biases else None),
            out=self._product(attention.o_proj.weight.detach(), out_bias),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self._product(_joined([mlp.gate_proj, mlp.up_proj])),
            down=self._product(mlp.down_proj.weight.detach()),
        )

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            # A third of the time of functional.rms_norm at a few rows.
            norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
            scale = torch.addcmul(self._eps, norm, norm, value=1 / hidden.shape[-1]).rsqrt_()
            return (hidden * scale).mul_(weight)
        # As in transformers: the mean in float32, the weight applied in the model's dtype.
        wide = hidden.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


def _joined(modules: list[Any]) -> Tensor:
    """The modules' weights as one matrix; the modules then hold views of it, so memory is not doubled."""
    whole = torch.cat([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        end = start + module.weight.shape[0]
        module.weight = torch.nn.Parameter(whole[start:end], requires_grad=False)
        start = end
    return whole
