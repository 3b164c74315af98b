"""A coverage-guided fuzz run of the codec; what it finds new goes into tests/wire/corpus.txt, which the tests replay.

    pip install atheris        # in an environment of its own: nothing else needs it
    python scripts/fuzz_codec.py [--seconds 120]

A frame may be refused with a `ProtocolError` and with nothing else; one that is read must be read as what it was
routed as, and survive being written and read again.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import os
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "wire" / "corpus.txt"
MAX_ENTRY_BYTES = 2048
MAX_NEW_ENTRIES = 200


def read_corpus(path: Path) -> list[bytes]:
    """One entry a line, in base64: frames are not always text."""
    return [base64.b64decode(line) for line in path.read_text().split()]


def check(frame: bytes) -> None:
    """What holds of every frame."""
    from wire.codec import append_residence, decode, encode, peek
    from wire.errors import ProtocolError
    from wire.tensors import decode_tensor

    append_residence(frame, 0.5)
    try:
        peeked = peek(frame)
    except ProtocolError:
        peeked = None
    try:
        message = decode(frame)
    except ProtocolError:
        message = None
    if message is not None:
        assert peeked == (message.type, getattr(message, "session", None)), "routed as one thing, read as another"
        assert decode(encode(message)) == message
    try:
        decode_tensor(frame)
    except ProtocolError:
        return


def main() -> None:
    """The command; the fuzzer runs in a process of its own, because it ends the one that it is in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120, help="how long")
    args = parser.parse_args()
    seeds = read_corpus(CORPUS) if CORPUS.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(seeds):
            (Path(folder) / f"seed{i}").write_bytes(seed)
        run([folder, f"-max_total_time={args.seconds}", f"-max_len={MAX_ENTRY_BYTES}", "-timeout=5"])
        # The fuzzer has kept what reached code that nothing before it had.
        found = {path.read_bytes() for path in Path(folder).iterdir()} - set(seeds)
    entries = sorted({*seeds, *sorted(found, key=len)[:MAX_NEW_ENTRIES]}, key=lambda entry: (len(entry), entry))
    CORPUS.write_text("".join(base64.b64encode(entry).decode() + "\n" for entry in entries if entry))
    print(f"{len(seeds)} entries before, {len(entries)} now, in {CORPUS.relative_to(ROOT)}")


def run(flags: list[str]) -> None:
    """Run the fuzzer with these flags of libFuzzer's; ends us if it found a fault, whose frame it has printed."""
    pid = os.fork()
    if pid == 0:
        import atheris

        with atheris.instrument_imports(include=["wire"]):
            for name in ("wire.codec", "wire.tensors"):
                importlib.import_module(name)
        atheris.Setup([sys.argv[0], *flags], check)
        atheris.Fuzz()
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"the fuzzer ended with status {status}: see the frame above")


if __name__ == "__main__":
    main()
