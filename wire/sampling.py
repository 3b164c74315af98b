"""The sampling parameters of a request, and the limits they are held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.errors import ProtocolError
from wire.fields import check_int, check_number, shown

MAX_BIASES = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target's token is chosen from its logits.

    Order of processing: repetition, frequency and presence penalties, logit bias, min_tokens (the stop ids are
    banned), temperature, top-k, top-p, min-p. Temperature 0 takes the argmax and ignores seed and filters.
    The repetition penalty looks at prompt and answer (Keskar et al. 2019, CTRL, as in transformers); frequency
    and presence count the answer's tokens (as in the OpenAI API: "how often that token was sampled prior").

    Attributes:
        temperature: 0 for greedy, at most 100.
        top_k: keep the k best, 0 for all.
        top_p: keep the smallest set whose probability reaches top_p.
        min_p: keep tokens at least min_p times as probable as the best.
        seed: the noise is a function of (seed, position, token id), nothing else.
        logit_bias: token id (a decimal string, as JSON has it) to an additive bias in -100..100.
        min_tokens: no stop id before this many tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = field(default_factory=dict)
    min_tokens: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, 0, MAX_TOKEN_ID)
        check_number("top_p", self.top_p, 1e-6, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_int("seed", self.seed, -MAX_SEED, MAX_SEED)
        check_number("repetition_penalty", self.repetition_penalty, 1e-3, 10.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_int("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID)
        if not isinstance(self.logit_bias, dict):
            raise ProtocolError(f"logit_bias must be an object, got {shown(self.logit_bias)}")
        if len(self.logit_bias) > MAX_BIASES:
            raise ProtocolError(f"logit_bias has {len(self.logit_bias)} entries, the limit is {MAX_BIASES}")
        for key, bias in self.logit_bias.items():
            known = isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdecimal()
            if not known or int(key) > MAX_TOKEN_ID:
                raise ProtocolError(f"logit_bias must be keyed by token ids in 0..{MAX_TOKEN_ID}, got {shown(key)}")
            check_number(f"logit_bias[{key}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax, without noise."""
        return self.temperature == 0.0
