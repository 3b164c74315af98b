"""Who gets in: credentials by role, their rotation and limits, TLS, and what is shown over plain HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from infra.agent import make_certificate
from relay.access import Access
from relay.config import RelayConfig
from relay.credentials import CredentialsError
from wire.aio.dialer import keep_linked
from wire.aio.link import dial
from wire.aio.quiet import MAX_BURST
from wire.errors import LinkLost, Refused
from wire.messages import PROTOCOL_VERSION, Cancel, Done, Error, Hello, ModelIdentity, OpenSession, TextDelta
from wire.settings import ssl_context

BOUND_S = 20.0
NODE, NODE_NEXT, APP, ADMIN = "node-secret-one", "node-secret-two", "client-secret", "admin-secret"


def entry(name: str, role: str, *secrets: str, **limits: float) -> str:
    lines = [f'[[credential]]\nname = "{name}"\nroles = ["{role}"]\nsecrets = {list(secrets)}']
    return "\n".join(lines + [f"{key} = {value}" for key, value in limits.items()]) + "\n"


async def write(path: Path, *entries: str) -> Path:
    def do() -> Path:
        path.write_text("\n".join(entries))
        path.chmod(0o600)
        return path

    return await asyncio.to_thread(do)


def hello(role: str, model: ModelIdentity | None = None) -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, role=role, name=role, model=model)


async def get(port: int, path: str, secret: str = "") -> tuple[int, str]:
    """Status and body of a plain HTTP request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    authorization = f"Authorization: Bearer {secret}\r\n" if secret else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{authorization}\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), BOUND_S)).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


class Links:
    """A user of a node's links who only keeps them."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[Any] = asyncio.Queue()

    def on_link(self, link: Any) -> None:
        self.links.put_nowait(link)

    def on_link_lost(self) -> None: ...

    def on_frame(self, frame: bytes, now: float) -> None: ...


async def test_c046_a_credential_is_good_for_its_role_alone(
    start_relay: Any, tmp_path: Path, target: ModelIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = await write(tmp_path / "c.toml", entry("nodes", "node", NODE), entry("app", "client", APP))
    relay = await start_relay(credentials=path)
    with pytest.raises(Refused, match="credential app is for client, not for a verify"):
        await dial(relay.url, secret=APP, hello=hello("verify", target))
    with pytest.raises(Refused, match="credential nodes is for node, not for a client"):
        await dial(relay.url, secret=NODE, hello=hello("client"))
    with pytest.raises(Refused, match="401"):
        await dial(relay.url, secret="a-wrong-secret", hello=hello("client"))
    assert not relay.server.router.peers
    link = await dial(relay.url, secret=NODE, hello=hello("verify", target))
    await link.close()
    assert not [r for r in caplog.records if any(secret in r.getMessage() for secret in (NODE, APP, "a-wrong-secret"))]


async def test_a_secret_is_rotated_without_a_refusal_and_its_end_closes_the_links(
    start_relay: Any, tmp_path: Path, target: ModelIdentity
) -> None:
    """The relay's file gets the new secret, the node's file is switched, the relay's file loses the old one."""
    path = await write(tmp_path / "c.toml", entry("nodes", "node", NODE), entry("app", "client", APP))
    own = await write(tmp_path / "secret", NODE)
    relay = await start_relay(credentials=path, reload_s=0.01)
    user = Links()
    node = asyncio.create_task(
        keep_linked(user, url=relay.url, secret=NODE, secret_file=own, hello=hello("verify", target), ssl_context=None)
    )
    await asyncio.wait_for(user.links.get(), BOUND_S)
    (digest,) = {identity.digest for identity in relay.server.identities.values()}
    await write(path, entry("nodes", "node", NODE_NEXT, NODE), entry("app", "client", APP))
    while relay.server.access.credentials.find(NODE_NEXT) is None:
        await asyncio.to_thread(os.stat, path)
    assert len(relay.server.links) == 1, "nobody was closed"
    await write(own, NODE_NEXT)
    await write(path, entry("nodes", "node", NODE_NEXT), entry("app", "client", APP))
    await asyncio.wait_for(user.links.get(), BOUND_S)
    (renewed,) = {identity.digest for identity in relay.server.identities.values()}
    assert renewed != digest
    node.cancel()
    await asyncio.wait([node])


async def test_a_bad_file_changes_nothing_and_a_bad_first_file_is_an_error(
    start_relay: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = await write(tmp_path / "c.toml", entry("app", "client", APP))
    relay = await start_relay(credentials=path, reload_s=0.01)
    await write(path, "nonsense")
    while not any("stay as they were" in r.getMessage() for r in caplog.records):
        await asyncio.to_thread(os.stat, path)
    link = await dial(relay.url, secret=APP, hello=hello("client"))
    await link.close()
    with pytest.raises(CredentialsError, match=r"--credentials .*c\.toml"):
        await Access(RelayConfig(secret="", credentials=path)).load()
    with pytest.raises(FileNotFoundError):
        await Access(RelayConfig(secret="", credentials=tmp_path / "none.toml")).load()


async def test_sessions_are_limited_by_credential_over_all_its_links(start_relay: Any, tmp_path: Path) -> None:
    path = await write(
        tmp_path / "c.toml", entry("nodes", "node", NODE), entry("app", "client", APP, max_sessions=2),
        entry("other", "client", "another-client-secret"),
    )  # fmt: skip
    relay = await start_relay(credentials=path)
    verify = await relay.join("verify", secret=NODE)
    first, second = [await relay.join("client", secret=APP) for _ in range(2)]
    for i, client in enumerate((first, second)):
        client.send(OpenSession(session=f"s{i}", prompt="x", speculate=False))
        await verify.expect(OpenSession)
    second.send(OpenSession(session="s2", prompt="x", speculate=False))
    error = await second.expect(Error)
    assert (error.code, error.message) == ("overloaded", "2 sessions are open already, the limit is 2")
    third = await relay.join("client", secret="another-client-secret")
    third.send(OpenSession(session="s3", prompt="x", speculate=False))
    await verify.expect(OpenSession)
    verify.send(Done(session="s0", finish_reason="stop", prompt_tokens=1, completion_tokens=0))
    await first.expect(Done)
    second.send(OpenSession(session="s2", prompt="x", speculate=False))
    await verify.expect(OpenSession)


async def test_a_client_above_its_rate_is_read_more_slowly_and_the_others_are_not(
    start_relay: Any, tmp_path: Path
) -> None:
    path = await write(
        tmp_path / "c.toml", entry("nodes", "node", NODE), entry("fast", "client", APP),
        entry("slow", "client", "another-client-secret", frames_per_s=50),
    )  # fmt: skip
    relay = await start_relay(credentials=path)
    verify = await relay.join("verify", secret=NODE)
    flooding = await relay.join("client", secret="another-client-secret")
    client = await relay.join("client", secret=APP)
    for _ in range(2000):
        flooding.send(Cancel(session="nothing"))
    await flooding.link.flush()
    for i in range(50):
        client.send(OpenSession(session=f"s{i}", prompt="x", speculate=False))
        await verify.expect(OpenSession)
        verify.send(TextDelta(session=f"s{i}", start=0, tokens=(1,), text="x"))
        await client.expect(TextDelta)
    (link,) = [link for link in relay.server.links.values() if link.pace is not None]
    # The burst of a second, and what a busy machine lets through meanwhile; not the flood.
    assert link.num_read < 1500
    assert relay.server.paces["slow"].num_delayed > 0
    assert flooding.link.connection.state.name == "OPEN"


async def test_a_client_far_above_its_rate_keeps_its_link_and_is_answered_in_the_end(
    start_relay: Any, tmp_path: Path
) -> None:
    """Its frame is paid for by a wait of several timeouts."""
    path = await write(
        tmp_path / "c.toml", entry("nodes", "node", NODE), entry("slow", "client", APP, bytes_per_s=10_000)
    )
    relay = await start_relay(credentials=path, ping_interval_s=0.1, ping_timeout_s=0.2)
    verify = await relay.join("verify", secret=NODE)
    client = await relay.join("client", secret=APP)
    client.send(OpenSession(session="s", prompt="x" * 25_000, speculate=False))
    await verify.expect(OpenSession)
    verify.send(Done(session="s", finish_reason="stop", prompt_tokens=1, completion_tokens=0))
    await client.expect(Done)
    assert relay.server.paces["slow"].num_delayed > 0


async def test_a_client_that_goes_while_it_is_read_later_is_missed_at_once(start_relay: Any, tmp_path: Path) -> None:
    path = await write(tmp_path / "c.toml", entry("nodes", "node", NODE), entry("slow", "client", APP, bytes_per_s=1))
    relay = await start_relay(credentials=path)
    client = await relay.join("client", secret=APP)
    client.send(Cancel(session="nothing"))
    while not relay.server.paces["slow"].num_delayed:  # noqa: ASYNC110  # there is nothing to wait on
        await asyncio.sleep(0)
    await client.close()
    async with asyncio.timeout(5.0):
        while relay.server.router.peers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_c046_tls_is_verified_and_a_private_authority_can_be_named(start_relay: Any, tmp_path: Path) -> None:
    def certificates() -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        for name, host in (("good", "127.0.0.1"), ("other", "elsewhere.example")):
            authority.issue_cert(host).private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
        (tmp_path / "served.pem").write_bytes((tmp_path / "good.pem").read_bytes())

    await asyncio.to_thread(certificates)
    served = tmp_path / "served.pem"
    relay = await start_relay(tls_cert=served, reload_s=0.01)
    url = relay.url.replace("ws://", "wss://")
    trusting = await asyncio.to_thread(ssl_context, url, tmp_path / "ca.pem")
    link = await dial(url, secret=relay.secret, hello=hello("client"), ssl_context=trusting)
    await link.close()
    with pytest.raises(LinkLost, match="certificate verify failed"):
        await dial(url, secret=relay.secret, hello=hello("client"), ssl_context=ssl_context(url, None))
    with pytest.raises(LinkLost):
        await dial(relay.url, secret=relay.secret, hello=hello("client"))

    async def replaced(new: bytes) -> None:
        """Have the relay look at the file with these bytes in it."""
        before = relay.server.access._seen
        await asyncio.to_thread(served.write_bytes, new)
        while relay.server.access._seen == before or relay.server.access._seen[0][1] != len(new):
            await asyncio.to_thread(os.stat, served)

    other = await asyncio.to_thread((tmp_path / "other.pem").read_bytes)
    # A file that is half written spoils nothing: the key comes first in it, the certificate is not there yet.
    await replaced(other[: other.index(b"-----BEGIN CERTIFICATE-----")])
    await (await dial(url, secret=relay.secret, hello=hello("client"), ssl_context=trusting)).close()
    await replaced(other[other.index(b"-----BEGIN CERTIFICATE-----") :])
    await (await dial(url, secret=relay.secret, hello=hello("client"), ssl_context=trusting)).close()
    # The certificate is replaced by one of another host: new handshakes get it.
    await replaced(other)
    with pytest.raises(LinkLost, match=r"certificate is not valid for '127\.0\.0\.1'"):
        await dial(url, secret=relay.secret, hello=hello("client"), ssl_context=trusting)
    assert trusting is not None
    assert trusting.verify_mode is ssl.CERT_REQUIRED


async def test_health_is_for_all_and_metrics_are_for_admins(start_relay: Any, tmp_path: Path) -> None:
    path = await write(
        tmp_path / "c.toml", entry("nodes", "node", NODE), entry("app", "client", APP), entry("ops", "admin", ADMIN)
    )
    relay = await start_relay(credentials=path)
    port = relay.server.port
    assert await get(port, "/healthz") == (200, "ok\n")
    assert await get(port, "/readyz") == (503, "no verify node is connected\n")
    verify = await relay.join("verify", secret=NODE)
    assert await get(port, "/readyz?verbose") == (200, "ok\n")
    relay.server.router.peers[verify.id].draining = True
    assert await get(port, "/readyz") == (503, "every verify node is draining\n")
    for secret in ("", "wrong-secret", NODE, APP):
        assert (await get(port, "/metrics", secret))[0] == 401
    status, body = await get(port, "/metrics", ADMIN)
    assert status == 200
    assert 'foredraft_peers{role="verify"} 1\n' in body
    assert "# TYPE foredraft_drops_total counter\n" in body
    assert (await get(port, "/elsewhere", ADMIN))[0] == 426


async def test_metrics_count_what_happened(relay: Any) -> None:
    verify, client = await relay.join("verify"), await relay.join("client")
    client.send(OpenSession(session="s", prompt="x"))
    await verify.expect(OpenSession)
    verify.send(TextDelta(session="s", start=0, tokens=(1,), text="x"))
    verify.send(TextDelta(session="t", start=0, tokens=(1,), text="x"))
    await client.expect(TextDelta)
    client.send(b"nonsense")
    await client.expect(Error)
    _, body = await get(relay.server.port, "/metrics", relay.secret)
    lines = dict(line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
    assert lines["foredraft_sessions"] == "1"
    assert lines["foredraft_pairs"] == "0"
    assert lines['foredraft_drops_total{reason="unknown_session"}'] == "1"
    assert lines['foredraft_drops_total{reason="malformed"}'] == "1"
    assert int(lines['foredraft_frames_total{direction="in"}']) >= 6
    assert float(lines["process_resident_memory_bytes"]) > 1e6
    assert float(lines["process_cpu_seconds_total"]) > 0
    assert any(key.startswith("foredraft_rtt_seconds{") for key in lines)
    total = lines['foredraft_frames_total{direction="in"}']
    await client.close()
    await verify.expect(Cancel)
    _, body = await get(relay.server.port, "/metrics", relay.secret)
    (again,) = [line for line in body.splitlines() if line.startswith('foredraft_frames_total{direction="in"}')]
    assert int(again.split()[1]) >= int(total), "a link that ends takes its counts with it"


@pytest.mark.parametrize("kinds", [("ECDSA", "RSA"), ("RSA", "ECDSA")])
async def test_a_renewed_certificate_is_served_though_its_key_is_of_another_kind(
    start_relay: Any, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """A context that is loaded twice holds one certificate for each kind of key, and picks by the peer's liking."""
    served, authority = tmp_path / "served.pem", trustme.CA()

    def write_certificate(kind: str) -> bytes:
        issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType[kind])
        served.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    old = await asyncio.to_thread(write_certificate, kinds[0])
    relay = await start_relay(tls_cert=served, reload_s=0.01)
    context = ssl.create_default_context()
    authority.configure_trust(context)

    async def shown(server_hostname: str) -> bytes | None:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", relay.server.port, ssl=context, server_hostname=server_hostname
        )
        certificate: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certificate

    assert await shown("127.0.0.1") == old
    seen = relay.server.access._seen
    new = await asyncio.to_thread(write_certificate, kinds[1])
    while relay.server.access._seen == seen:
        await asyncio.to_thread(os.stat, served)
    assert await shown("127.0.0.1") == new


async def test_c080_a_file_that_is_away_is_told_a_few_times(
    start_relay: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await write(tmp_path / "c.toml", entry("app", "client", APP))
    relay = await start_relay(credentials=path, reload_s=0.001)
    looks = 0
    look = relay.server.access._look

    def counted() -> Any:
        nonlocal looks
        looks += 1
        return look()

    monkeypatch.setattr(relay.server.access, "_look", counted)
    await asyncio.to_thread(path.unlink)
    while looks < 50:
        await asyncio.to_thread(os.stat, tmp_path)
    assert sum("stay as they were" in r.getMessage() for r in caplog.records) <= MAX_BURST


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_a_node_comes_back_to_a_relay_that_made_itself_a_new_certificate(
    start_relay: Any, tmp_path: Path, target: ModelIdentity
) -> None:
    """As on AWS: another relay machine at the same address, with a certificate of the same name by another key."""
    served, trusted = tmp_path / "served.pem", tmp_path / "trusted.pem"

    def certificate(name: str) -> bytes:
        make_certificate(tmp_path / name, "127.0.0.1")
        return (tmp_path / name / "relay.key").read_bytes() + (tmp_path / name / "relay.pem").read_bytes()

    old, new = [await asyncio.to_thread(certificate, name) for name in ("old", "new")]
    await asyncio.to_thread(served.write_bytes, old)
    await asyncio.to_thread(shutil.copy, tmp_path / "old" / "relay.pem", trusted)
    relay = await start_relay(tls_cert=served, reload_s=0.01)
    url = relay.url.replace("ws://", "wss://")
    user = Links()
    context = await asyncio.to_thread(ssl_context, url, trusted)
    node = asyncio.create_task(
        keep_linked(
            user, url=url, secret=relay.secret, hello=hello("verify", target), ssl_context=context, ca_file=trusted
        )
    )
    first = await asyncio.wait_for(user.links.get(), BOUND_S)
    await asyncio.to_thread(served.write_bytes, new)
    refused = False
    while not refused:
        try:
            await (await dial(url, secret=relay.secret, hello=hello("client"), ssl_context=context)).close()
        except LinkLost as exc:
            refused = "certificate verify failed" in str(exc)
    await first.close()
    await asyncio.to_thread(shutil.copy, tmp_path / "new" / "relay.pem", trusted)
    await asyncio.wait_for(user.links.get(), BOUND_S)
    node.cancel()
    await asyncio.wait([node])
