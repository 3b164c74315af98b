"""The flags of the nodes: defaults, and what is refused."""

from __future__ import annotations

import os

import pytest

from node_draft.config import DraftConfig
from node_verify.config import VerifyConfig

NEEDED = ["--relay", "ws://127.0.0.1:1", "--model", "m"]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SECRET", "a-secret-of-the-tests")


@pytest.mark.parametrize("config", [VerifyConfig, DraftConfig])
def test_a_checkpoints_own_code_is_not_trusted_unless_asked_and_passes_are_captured(
    config: type[VerifyConfig | DraftConfig],
) -> None:
    default = config.read(NEEDED)
    assert (default.trust_remote_code, default.capture, default.self_check) == (False, True, True)
    asked = config.read([*NEEDED, "--trust-remote-code", "--no-capture", "--max-length", "0"])
    assert (asked.trust_remote_code, asked.capture, asked.max_length) == (True, False, 0)


def test_a_node_bounds_the_compiled_products_it_keeps_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound a draft node grew by 330 MB with the shapes of its passes."""
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "77")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    VerifyConfig.read(NEEDED)
    assert os.environ["LRU_CACHE_CAPACITY"] == "77"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"


def test_the_device_map_is_transformers_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert VerifyConfig.read(NEEDED).device_map == ""
    assert VerifyConfig.read([*NEEDED, "--device-map", "auto"]).device_map == "auto"
    with pytest.raises(SystemExit) as caught:
        VerifyConfig.read([*NEEDED, "--device-map", "everywhere"])
    assert caught.value.code == 2
    assert "--device-map: invalid choice: 'everywhere'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["15", "-1", "x", "2097152"])
def test_a_maximum_length_out_of_bounds_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        VerifyConfig.read([*NEEDED, "--max-length", value])
    assert f"--max-length: must be an integer in 16..1048576, got '{value}'" in capsys.readouterr().err
