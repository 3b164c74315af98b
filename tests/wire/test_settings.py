from __future__ import annotations

import argparse
import logging
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import configargparse
import pytest

from wire.settings import add_node_arguments, parser, read_secret, seconds, setup_logging, ssl_context, whole

SECRET = "correct-horse-battery"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREDRAFT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root, library = logging.getLogger(), logging.getLogger("websockets")
    handlers, level, library_level = root.handlers[:], root.level, library.level
    yield
    root.handlers[:], root.level = handlers, level
    library.setLevel(library_level)


def relay_parser() -> configargparse.ArgumentParser:
    arguments = parser("relay", "The relay.")
    arguments.add_argument("--port", type=whole(0, 65_535), default=8700)
    return arguments


def test_a_flag_wins_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "foredraft.toml"
    file.write_text("[relay]\nport = 3\nlog-level = 'error'\n[draft]\nport = 9\n")
    assert relay_parser().parse_args([]).port == 8700
    assert relay_parser().parse_args(["--config", str(file)]).port == 3
    monkeypatch.setenv("FOREDRAFT_RELAY_PORT", "2")
    monkeypatch.setenv("FOREDRAFT_DRAFT_PORT", "9")
    given = relay_parser().parse_args(["--config", str(file)])
    assert (given.port, given.log_level) == (2, "error")
    assert relay_parser().parse_args(["--config", str(file), "--port", "1"]).port == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "x"], "--port: must be an integer in 0..65535, got 'x'"),
        (["--port", "70000"], "--port: must be an integer in 0..65535, got '70000'"),
        (["--prot", "1"], "unrecognized arguments"),
        (["--secret", SECRET], "unrecognized arguments"),
        (["--config", "/nowhere/x.toml"], "/nowhere/x.toml"),
    ],
)
def test_a_usage_error_exits_with_two_and_names_the_flag(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        relay_parser().parse_args(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_node_must_be_told_its_relay(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parser("draft", "The draft node.")
    add_node_arguments(arguments, default_name="draft")
    with pytest.raises(SystemExit) as caught:
        arguments.parse_args([])
    assert caught.value.code == 2
    assert "--relay" in capsys.readouterr().err
    given = arguments.parse_args(["--relay", "ws://r:1"])
    assert (given.relay, given.name, given.threads) == ("ws://r:1", "draft", 1)


def secret_of(*argv: str) -> str:
    arguments = relay_parser()
    return read_secret(arguments, arguments.parse_args(argv))


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)
    assert secret_of() == SECRET
    file = tmp_path / "secret"
    file.write_text("another-long-secret\n")
    assert secret_of("--secret-file", str(file)) == "another-long-secret"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no secret of at least 8 characters: set FOREDRAFT_SECRET or give --secret-file"),
        (b"short", "no secret of at least 8 characters"),
        (b"with spaces in it", "printable ASCII"),
        ("Schlüsselwort".encode(), "printable ASCII"),
        (b"\xff\xfe\x00binary", "not a text file"),
        (None, "No such file"),
    ],
)
def test_a_bad_secret_is_a_usage_error_that_does_not_show_it(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        secret_of("--secret-file", str(file))
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert "short" not in told
    assert "spaces in it" not in told


def test_tls_is_verified_always() -> None:
    assert ssl_context("ws://relay:1", None) is None
    context = ssl_context("wss://relay:1", None)
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize(("text", "reason"), [(None, "No such file"), ("no certificate", "CERTIFICATE")])
def test_a_bad_file_of_an_authority_is_named(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OSError, match=rf"--ca-file {path}: .*{reason}"):
        ssl_context("wss://relay", path)


@pytest.mark.usefixtures("logging_as_before")
def test_debug_logging_does_not_turn_on_the_librarys_headers(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("debug")
    logging.getLogger("websockets.client").debug("> Authorization: Bearer %s", SECRET)
    logging.getLogger("wire.aio.link").debug("> frame")
    told = capsys.readouterr().err
    assert SECRET not in told
    assert "DEBUG   wire.aio.link: > frame" in told


def test_whole_numbers_have_bounds() -> None:
    convert = whole(1, 3)
    assert [convert("1"), convert("3")] == [1, 3]
    for text in ("0", "4", "2.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=r"in 1\.\.3"):
            convert(text)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("text", ["0.5", "-1", "nan", "inf", "soon"])
def test_durations_are_finite_and_have_a_least(text: str) -> None:
    assert seconds(1.0)("1.5") == 1.5
    with pytest.raises(argparse.ArgumentTypeError, match=rf"seconds from 1 on, got '{text}'"):
        seconds(1.0)(text)


def test_a_name_cannot_make_up_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    log = logging.getLogger("relay.server")
    log.info("< %s left: %s", "peer\n2026-01-01 INFO relay: all is well", "caf\u00e9 \x1b[2J\u2028\x85")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"< peer\n2026-01-01 INFO relay: all is well left: café \x1b[2J\u2028\x85")
    try:
        raise ValueError("a bug")
    except ValueError:
        log.exception("failed")
    assert len(capsys.readouterr().err.splitlines()) > 2, "a traceback has lines of its own"
