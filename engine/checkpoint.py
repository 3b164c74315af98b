"""A checkpoint directory or hub id: found, judged, loaded, named."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from engine.errors import CheckpointError
from engine.hf import CausalLM
from engine.hf_load import Graft, end_tokens, first_line, load_config, load_model, refuse_layers
from engine.products import int8_available
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """What is compared between nodes; the fields mean what they do in `wire.messages.ModelIdentity`."""

    name: str
    revision: str
    tokenizer: str
    vocab_size: int
    context_length: int
    stop_ids: tuple[int, ...]
    weights: str
    drafts_for: str


def find_checkpoint(model: str, *, revision: str | None = None, with_code: bool = False) -> Path:
    """The directory of a model given by path or by hub id; a hub id is downloaded if it is not cached.

    Args:
        with_code: download Python files too.

    Raises:
        CheckpointError: there is no such directory, or the hub does not give it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json; --model must be a Hugging Face checkpoint directory")
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(f"{model} does not exist; --model takes a checkpoint directory or a hub id like org/name")
    small = [*_SMALL_FILES, *(["*.py"] if with_code else [])]
    try:
        directory = Path(snapshot_download(model, revision=revision, allow_patterns=[*small, "*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(model, revision=revision, allow_patterns=[*small, "*.bin"]))
    except Exception as exc:  # the hub client's many errors: offline, not found, gated
        raise CheckpointError(
            f"{model} is neither a directory nor to be had from the hub ({first_line(exc)}); "
            "give a checkpoint directory, or download it first"
        ) from exc
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{model} on the hub has no config.json; it is not a transformers checkpoint")
    return directory


class Checkpoint:
    """A model on disk. Opening it reads the config only; `tokenizer` and `load` read the rest.

    Args:
        model: directory or hub id.
        revision: of a hub id.
        max_length: most tokens of a session; 0 for the model's own limit.
        trust_remote_code: run code that came with the checkpoint.

    Raises:
        CheckpointError: it cannot be served; the message says why and what to do.
    """

    def __init__(
        self, model: str, *, revision: str | None = None, max_length: int = 0, trust_remote_code: bool = False
    ) -> None:
        self.directory = find_checkpoint(model, revision=revision, with_code=trust_remote_code)
        self.name = self.directory.resolve().name if Path(model).expanduser().is_dir() else model
        self._trust_remote_code = trust_remote_code
        self._config = load_config(self.directory, trust_remote_code=trust_remote_code)
        limit = getattr(self._config.get_text_config(), "max_position_embeddings", None) or 0
        if not limit and not max_length:
            raise CheckpointError(f"{self.name} names no maximum length; give one")
        if limit and max_length > limit:
            raise CheckpointError(f"the maximum length {max_length} exceeds the {limit} positions {self.name} knows")
        self.max_length = max_length or limit
        refuse_layers(self._config, self.max_length, self.name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded on first use."""
        return Tokenizer.load(self.directory, trust_remote_code=self._trust_remote_code)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The union of the end tokens that tokenizer, config and generation config name."""
        ids = end_tokens(self.directory, self._config, self.tokenizer.hf)
        return tuple(token for token in ids if 0 <= token < self.tokenizer.vocab_size)

    def load(
        self,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        num_layers: int | None = None,
        graft: Graft | None = None,
        device_map: str = "",
    ) -> CausalLM:
        """Load the weights.

        Args:
            dtype: one of DTYPES, or "int8" for a drafter: int8 weights, bfloat16 between them.
            num_layers: take the first layers only; a weak drafter for the same checkpoint.
            graft: trained layers in place of some of these.
            device_map: transformers' own, in place of `device`.

        Raises:
            CheckpointError: they do not load, or do not fit the tokenizer.
        """
        int8 = dtype == "int8"
        if int8 and not int8_available():
            log.warning("this build of torch has no int8 product: the drafter runs in bfloat16")
            int8, dtype = False, "bfloat16"
        if not int8 and dtype not in DTYPES:
            raise CheckpointError(f"dtype must be one of {', '.join([*DTYPES, 'int8'])}; got {dtype}")
        # A fresh config: loading some of the layers changes it.
        config = load_config(self.directory, trust_remote_code=self._trust_remote_code)
        lm = load_model(
            self.directory,
            config,
            dtype=torch.bfloat16 if int8 else DTYPES[dtype],
            device=device,
            num_layers=num_layers,
            graft=graft,
            int8=int8,
            device_map=device_map,
            trust_remote_code=self._trust_remote_code,
        )
        num_embeddings = lm.model.get_input_embeddings().weight.shape[0]
        if num_embeddings < self.tokenizer.vocab_size:
            raise CheckpointError(
                f"{self.name} has {num_embeddings} embeddings for the {self.tokenizer.vocab_size} ids of its tokenizer"
            )
        return lm

    @cached_property
    def _raw_config(self) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads((self.directory / "config.json").read_text("utf-8"))
        return raw

    @cached_property
    def _config_digest(self) -> str:
        return hashlib.sha256(json.dumps(self._raw_config, sort_keys=True).encode()).hexdigest()

    @cached_property
    def weights(self) -> str:
        """Digest of the weights, see `digest_weights`; read on first use."""
        return digest_weights(self.directory, self._config_digest)

    def identity(self, *, num_layers: int | None = None) -> CheckpointIdentity:
        """What the handshake compares."""
        commit = self.directory.name if self.directory.parent.name == "snapshots" else ""
        return CheckpointIdentity(
            name=self.name if num_layers is None else f"{self.name} (first {num_layers} layers)",
            revision=commit or self._config_digest[:16],
            tokenizer=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            context_length=self.max_length,
            stop_ids=self.stop_ids,
            weights=self.weights,
            drafts_for=str(self._raw_config.get("drafts_for", "")),
        )


def choose_format(asked: str, *, on_cpu: str) -> tuple[str, str]:
    """(dtype, device) for what --dtype asked; "auto" is bfloat16 on a GPU, float16 on one that only emulates it, and
    `on_cpu` without one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if asked != "auto":
        return asked, device
    if device == "cpu":
        return on_cpu, device
    return ("bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"), device


def digest_weights(directory: Path, config_digest: str) -> str:
    """A quick digest: SHA-256 over the config's digest and, of each weight file in order of names, its name, its size,
    its header (of safetensors files) and 64 evenly spaced samples of 4 KiB.

    Two trainings differ in every tensor, so samples tell them apart; it is no protection against somebody who
    changes single weights on purpose.
    """
    digest = hashlib.sha256(config_digest.encode())
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\t{size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                header_bytes = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(header_bytes, size)))
            for i in range(_SAMPLES_PER_FILE):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
