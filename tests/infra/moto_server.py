"""A moto server in a process of its own: AWS over real HTTP on the loopback. For the tests and for bench_infra.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.infra.doubles import IMAGES


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """Its address; it knows the two images that our specs look for. Log and images lie in `folder`."""
    images = folder / "amis.json"
    images.write_text(json.dumps(IMAGES))
    environment = {**os.environ, "MOTO_AMIS_PATH": str(images), "PYTHONUNBUFFERED": "1"}
    with (folder / "log").open("wb") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            env=environment,
            stdout=sink,
            stderr=subprocess.PIPE,
            text=True,
        )
        drain = None
        assert server.stderr is not None
        try:
            line = ""
            while "Running on" not in line:
                line = server.stderr.readline()
                assert line, "moto did not start"
            # Whoever reads no more lets the pipe fill: hand the rest to a file.
            drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=sink)
            match = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert match is not None
            yield match[0]
        finally:
            server.terminate()
            server.wait(timeout=20)
            server.stderr.close()
            if drain is not None:
                drain.wait(timeout=20)


def reset(url: str) -> None:
    """Forget everything that was made."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
