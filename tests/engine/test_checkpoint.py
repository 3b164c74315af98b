import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.capturer import Uncaptured
from engine.checkpoint import Checkpoint, choose_format, digest_weights
from engine.errors import CheckpointError
from engine.model import CachedModel
from engine.selfcheck import self_check
from engine.tiny import tiny_checkpoint


def edit(directory: Path, name: str, **changes: object) -> None:
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def copied(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Llama of the test's own, to be broken."""
    copy = tmp_path / "copied"
    copy.mkdir()
    for path in tiny("llama").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "nowhere", "a/b/c"])
def test_a_missing_path_is_refused_in_one_line(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; --model takes") as caught:
        Checkpoint(model)
    assert "\n" not in str(caught.value)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint(str(tmp_path))


def test_a_hub_id_that_cannot_be_had_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise OSError("cannot reach the hub\nand more")

    monkeypatch.setattr("engine.checkpoint.snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"org/name is neither .*cannot reach the hub.*download it first"
    ) as caught:
        Checkpoint("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"model_type": "no-such-thing"}, "cannot read the config"),
    ],
)
def test_what_is_no_causal_lm_is_refused(copied: Path, changes: dict[str, object], reason: str) -> None:
    edit(copied, "config.json", **changes)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint(str(copied))


def test_missing_or_broken_weights_are_refused(copied: Path) -> None:
    edit(copied, "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights"):
        Checkpoint(str(copied)).load()
    (copied / "model.safetensors").write_bytes(b"nonsense" * 4)
    with pytest.raises(CheckpointError, match="cannot load the weights"):
        Checkpoint(str(copied)).load()


def test_c028_end_tokens_are_the_union_of_tokenizer_and_configs(copied: Path) -> None:
    edit(copied, "generation_config.json", eos_token_id=[2, 300])
    edit(copied, "config.json", eos_token_id=301)
    assert Checkpoint(str(copied)).stop_ids == (0, 2, 300, 301)
    edit(copied, "generation_config.json", eos_token_id=None)
    edit(copied, "config.json", eos_token_id=None)
    assert Checkpoint(str(copied)).stop_ids == (0,)


def test_the_first_layers_alone_can_be_loaded(tiny: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(str(tiny("qwen2")))
    part, whole = checkpoint.load(num_layers=1), checkpoint.load()
    assert (len(part.layers), len(whole.layers)) == (1, 2)
    with torch.inference_mode():
        ids = torch.tensor([[5, 6, 7]])
        hidden = whole.model(input_ids=ids, output_hidden_states=True).hidden_states[1]
        expected = whole.model.lm_head(whole.model.model.norm(hidden))
        assert torch.allclose(part.model(input_ids=ids).logits, expected, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"layers must be in 1\.\.2"):
        checkpoint.load(num_layers=3)
    assert "first 1 layers" in checkpoint.identity(num_layers=1).name


def test_limits_and_types_are_checked(copied: Path) -> None:
    with pytest.raises(CheckpointError, match="513 exceeds the 512 positions"):
        Checkpoint(str(copied), max_length=513)
    with pytest.raises(CheckpointError, match="dtype must be one of float32"):
        Checkpoint(str(copied)).load(dtype="int4")
    assert Checkpoint(str(copied)).load(dtype="bfloat16").dtype == torch.bfloat16


def test_identity_names_tokenizer_weights_and_limits(copied: Path) -> None:
    identity = Checkpoint(str(copied), max_length=100).identity()
    assert (identity.name, identity.context_length, identity.vocab_size) == ("copied", 100, 320)
    assert identity.stop_ids == (0, 2)
    assert identity.drafts_for == ""
    assert len(identity.weights) == len(identity.tokenizer) == 64
    edit(copied, "config.json", drafts_for="other@1")
    changed = Checkpoint(str(copied)).identity()
    assert changed.drafts_for == "other@1"
    assert changed.revision != identity.revision


def test_weights_digest_changes_with_the_weights(copied: Path) -> None:
    before = digest_weights(copied, "config")
    assert digest_weights(copied, "config") == before != digest_weights(copied, "other")
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert digest_weights(copied, "config") != before


def test_two_seeds_write_two_checkpoints_and_one_seed_the_same(tmp_path: Path) -> None:
    one, same, other = (
        Checkpoint(str(tiny_checkpoint(tmp_path / name / "m", seed=seed))).identity()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same
    assert one.weights != other.weights


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_own_code(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of an architecture that transformers does not know, with its code beside it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(copied.parent / "modules"))
    (copied / "own.py").write_text(OWN_CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit(copied, "config.json", model_type="own-llama", architectures=["OwnForCausalLM"], auto_map=auto_map)
    return copied


def test_code_that_comes_with_a_checkpoint_is_not_run_unless_asked(with_own_code: Path) -> None:
    with pytest.raises(CheckpointError, match=r"brings Python code of its own, which is not run.*--trust-remote-code"):
        Checkpoint(str(with_own_code))
    assert not (with_own_code.parent / "modules").exists()


def test_code_that_comes_with_a_checkpoint_is_run_when_trusted(with_own_code: Path) -> None:
    lm = Checkpoint(str(with_own_code), trust_remote_code=True).load()
    assert type(lm.model).__name__ == "OwnForCausalLM"
    self_check(CachedModel(lm, num_slots=1, max_length=64, max_tree_rows=8))


def test_a_device_map_places_the_layers_and_the_cache_follows(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    original = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **options: Any) -> Any:
        given.append(options.get("device_map"))
        return original(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    lm = Checkpoint(str(copied)).load(device_map="auto")
    assert given == ["auto"]
    model = CachedModel(lm, num_slots=1, max_length=64, max_tree_rows=8)
    assert {tensor.device for segment in model.cache.segments for tensor in segment.tensors} == {lm.device}
    self_check(model)


def test_a_device_map_without_accelerate_says_what_to_install(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.hf_load.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="--device-map auto needs the package accelerate: pip install accelerate"):
        Checkpoint(str(copied)).load(device_map="auto")


@pytest.mark.gpu
def test_a_device_map_spreads_layers_over_gpus(copied: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    lm = Checkpoint(str(copied)).load(device_map="balanced")
    assert len({layer.device for layer in lm.layers}) > 1
    self_check(CachedModel(lm, num_slots=1, max_length=64, max_tree_rows=8, capturer=Uncaptured()))


@pytest.mark.parametrize(
    ("has_gpu", "has_bfloat16", "chosen"),
    [(True, True, ("bfloat16", "cuda")), (True, False, ("float16", "cuda")), (False, False, ("float32", "cpu"))],
)
def test_a_format_is_chosen_that_the_device_computes_with(
    has_gpu: bool, has_bfloat16: bool, chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated bfloat16, as on a T4, is an order of magnitude slower than float16."""

    def supported(including_emulation: bool = True) -> bool:
        return has_bfloat16 or (has_gpu and including_emulation)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert choose_format("auto", on_cpu="float32") == chosen
    assert choose_format("float32", on_cpu="int8")[0] == "float32"
