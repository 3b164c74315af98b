"""What the command lines have in common: settings from flags, environment and TOML, and logging.

A value is looked for in this order: flag, environment (FOREDRAFT_PROGRAM_NAME), the program's section of the TOML file
given by --config, default. The secret is never a flag: it would show in the process list.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import configargparse

from wire.printable import one_line

T = TypeVar("T")

SECRET_VARIABLE = "FOREDRAFT_SECRET"
KEPT_PRODUCTS = 256
KEPT_PRODUCTS_VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""A CPU's matrix products are compiled and kept for each shape, and candidates come in all numbers of rows: the 1,024
that PyTorch and oneDNN keep by default came to 330 MB at a draft node; 256, enough for 32 rows, come to 140. Both look
here when the first product is made."""
MIN_SECRET_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What draft and verify node are both told; units are in the names."""

    relay: str
    secret: str
    secret_file: Path | None
    name: str
    region: str
    model: str
    dtype: str
    slots: int
    max_length: int
    threads: int
    self_check: bool
    capture: bool
    trust_remote_code: bool
    grace_s: float
    model_timeout_s: float
    log_level: str
    trace: Path | None
    ca_file: Path | None
    spot_metadata: str
    spot_poll_s: float
    status_host: str
    status_port: int


def parser(program: str, description: str) -> configargparse.ArgumentParser:
    """A parser for `program`, with --config, --log-level and --secret-file."""
    arguments = configargparse.ArgumentParser(
        prog=f"foredraft-{program}",
        description=description,
        auto_env_var_prefix=f"FOREDRAFT_{program.upper()}_",
        config_file_parser_class=configargparse.TomlConfigParser([program]),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_argument("--config", is_config_file=True, help=f"TOML file; section [{program}]")
    arguments.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    arguments.add_argument(
        "--secret-file",
        type=Path,
        help=f"file with the secret (else: {SECRET_VARIABLE}); nodes read it again each time they dial",
    )
    return arguments


def add_node_arguments(arguments: configargparse.ArgumentParser, *, default_name: str) -> None:
    """What draft and verify node share."""
    arguments.add_argument("--relay", required=True, help="address of the relay, ws://HOST:PORT or wss://HOST:PORT")
    arguments.add_argument("--ca-file", type=Path, help="PEM file of a private certificate authority, for wss://")
    arguments.add_argument("--name", default=default_name, help="how the node is called in logs and errors")
    arguments.add_argument("--region", default="", help="where the node runs")
    arguments.add_argument("--slots", type=whole(1, 256), default=4, help="sessions served at a time")
    arguments.add_argument(
        "--max-length", type=length, default=2048,
        help="most tokens of prompt + answer in a session, 0 for the model's own limit; the cache grows as it is used",
    )  # fmt: skip
    arguments.add_argument("--threads", type=whole(1, 1024), default=1, help="threads of one forward pass on a CPU")
    arguments.add_argument(
        "--self-check", action=argparse.BooleanOptionalAction, default=True,
        help="hold the loaded model to the memory contract before it serves (under a second)",
    )  # fmt: skip
    arguments.add_argument(
        "--capture", action=argparse.BooleanOptionalAction, default=True,
        help="capture passes as graphs on a GPU, before the node says that it is ready",
    )  # fmt: skip
    arguments.add_argument(
        "--trust-remote-code", action=argparse.BooleanOptionalAction, default=False,
        help="run Python code that comes with the checkpoint, for architectures that transformers does not know",
    )  # fmt: skip
    arguments.add_argument("--grace-s", type=seconds(0.0), default=20.0, help="how long SIGTERM lets answers finish")
    arguments.add_argument(
        "--model-timeout-s", type=seconds(1.0), default=120.0,
        help="the node ends when one piece of the model's work takes longer: a device that hangs is not seen otherwise",
    )  # fmt: skip
    arguments.add_argument(
        "--spot-metadata", default="", metavar="URL",
        help="metadata service to ask for the notice of a spot instance's end, on EC2 http://169.254.169.254; the node "
        "then drains as after SIGTERM, for the time that is left",
    )  # fmt: skip
    arguments.add_argument(
        "--status-port", type=whole(-1, 65_535), default=-1,
        help="serve /healthz, /readyz and /metrics on this port, 0 for a free one; -1: on none",
    )  # fmt: skip
    arguments.add_argument("--status-host", default="127.0.0.1", help="address of the status port")
    arguments.add_argument("--spot-poll-s", type=seconds(0.01), default=5.0, help="how often it is asked")
    arguments.add_argument("--trace", type=Path, help="write a JSONL trace of passes and rounds to this file")


def node_values(arguments: configargparse.ArgumentParser, given: argparse.Namespace) -> dict[str, Any]:
    """The values of `NodeConfig`'s fields. Also bounds what the process keeps of compiled products, see below."""
    for name in KEPT_PRODUCTS_VARIABLES:
        os.environ.setdefault(name, str(KEPT_PRODUCTS))
    secret = read_secret(arguments, given)
    return {
        field.name: secret if field.name == "secret" else getattr(given, field.name) for field in fields(NodeConfig)
    }


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argument type: an integer in low..high."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be an integer in {low}..{high}, got {text!r}")
        return value

    return convert


def seconds(least: float) -> Callable[[str], float]:
    """An argument type: a finite duration in seconds, from `least` on."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a number of seconds from {least:g} on, got {text!r}")
        return value

    return convert


def length(text: str) -> int:
    """An argument type: a number of tokens, or 0 for what the model allows."""
    return 0 if text == "0" else whole(16, 1 << 20)(text)


def named(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argument type from a parser that raises ValueError with a message for people."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return convert


def read_secret(arguments: configargparse.ArgumentParser, given: argparse.Namespace) -> str:
    """The shared secret; a missing or short one is a usage error."""
    if given.secret_file is not None:
        try:
            secret = read_secret_file(given.secret_file)
        except OSError as exc:
            arguments.error(f"--secret-file {given.secret_file}: {exc.strerror}")
        except UnicodeDecodeError:
            arguments.error(f"--secret-file {given.secret_file}: not a text file")
    else:
        secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET_CHARS:
        arguments.error(
            f"no secret of at least {MIN_SECRET_CHARS} characters: set {SECRET_VARIABLE} or give --secret-file"
        )
    fault = secret_fault(secret)
    if fault:
        arguments.error(f"the secret {fault}")
    return str(secret)


def read_secret_file(path: Path) -> str:
    """The secret in a file.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return path.read_text().strip()


def secret_fault(secret: str) -> str:
    """What is wrong with a secret, without showing it; empty if nothing is."""
    if len(secret) < MIN_SECRET_CHARS:
        return f"has {len(secret)} characters, too few"
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        return "must be printable ASCII without spaces"
    return ""


def ssl_context(url: str, ca_file: Path | None) -> ssl.SSLContext | None:
    """Verification is always on; a private authority is added, not trusted instead of a check.

    Raises:
        OSError: the file of the authority is not good; the message names it.
    """
    if not url.lower().startswith("wss://"):
        return None
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as exc:
            # The library names no file.
            reason = exc.reason if isinstance(exc, ssl.SSLError) else exc.strerror
            raise OSError(f"--ca-file {ca_file}: {reason}") from None
    return context


class OneLine(logging.Formatter):
    """Keeps a message on its line, whatever is in names and reasons of peers; a traceback has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        record.message = one_line(record.message)
        return super().formatMessage(record)


def setup_logging(level: str) -> None:
    """Log to standard error. The websockets library logs headers at its debug level, so it stays above that."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[shown], force=True)
    logging.getLogger("websockets").setLevel(logging.WARNING)
