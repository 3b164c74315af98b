"""A drafter distilled for one target: the target's first layers, a few trained ones, and a head of frequent tokens.

The folder holds only what the target's checkpoint does not (`scripts/train_drafter.py` writes it):

    drafter.json         target (its weights' digest and name), frozen_layers, trained_layers, vocab, figures
    drafter.safetensors  layers.I.NAME and norm.weight in float16; ids, int32 [vocab], ascending target ids

The head's rows are the target's own output embeddings of `ids`. Logits come back at the target's width, with -inf for
what the head lacks, so that whoever reads them needs no id map.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.hf import CausalLM
from engine.hf_load import Graft


def load_distilled(folder: Path, target: Checkpoint, *, dtype: str, device: str) -> CausalLM:
    """Build the drafter from the target's checkpoint and the folder.

    Raises:
        CheckpointError: the folder is not a drafter, or was trained for another target.
    """
    try:
        about = json.loads((folder / "drafter.json").read_text("utf-8"))
        tensors = load_file(folder / "drafter.safetensors")
        frozen, trained = int(about["frozen_layers"]), int(about["trained_layers"])
        wanted = str(about["target_weights"])
    except FileNotFoundError as exc:
        raise CheckpointError(f"{folder} is not a distilled drafter: {exc.filename} is missing") from exc
    except Exception as exc:
        raise CheckpointError(f"{folder} is not a distilled drafter: {exc!r}") from exc
    if target.weights != wanted:
        raise CheckpointError(
            f"{folder} was distilled for {about.get('target', 'another target')} with weights {wanted[:12]}, "
            f"not for {target.name} with weights {target.weights[:12]}"
        )
    graft = Graft(ids=tensors.pop("ids").long(), tensors=tensors, first_layer=frozen)
    return target.load(dtype=dtype, device=device, num_layers=frozen + trained, graft=graft)
