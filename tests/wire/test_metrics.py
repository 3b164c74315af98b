"""The page that Prometheus reads, and the status port of a node."""

from __future__ import annotations

import asyncio
import math
import re

from hypothesis import given
from hypothesis import strategies as st

from wire.aio.health import StatusServer, health_page
from wire.metrics import Family, Histogram, counter, gauge, histograms, labelled, render

LINE = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (\S+)')


def test_a_page_is_what_prometheus_expects() -> None:
    slow = Histogram(bounds=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        slow.observe(value)
    page = render(
        [
            gauge("sessions", "Open sessions.", 3),
            counter("frames_total", "Frames.", 12_345_678_901),
            labelled("counter", "drops_total", "Drops.", "reason", {"slow": 1, 'with "quotes"\n': 2}),
            histograms("lag_seconds", "Lag.", "loop", {"main": slow}),
            labelled("gauge", "nothing", "Nothing yet.", "x", {}),
        ]
    )
    assert page == (
        "# HELP sessions Open sessions.\n# TYPE sessions gauge\nsessions 3\n"
        "# HELP frames_total Frames.\n# TYPE frames_total counter\nframes_total 12345678901\n"
        '# HELP drops_total Drops.\n# TYPE drops_total counter\ndrops_total{reason="slow"} 1\n'
        'drops_total{reason="with \\"quotes\\"\\n"} 2\n'
        "# HELP lag_seconds Lag.\n# TYPE lag_seconds histogram\n"
        'lag_seconds_bucket{loop="main",le="0.1"} 2\nlag_seconds_bucket{loop="main",le="1.0"} 3\n'
        'lag_seconds_bucket{loop="main",le="+Inf"} 4\nlag_seconds_sum{loop="main"} 7.65\n'
        'lag_seconds_count{loop="main"} 4\n'
        "# HELP nothing Nothing yet.\n# TYPE nothing gauge\n"
    )


@given(st.dictionaries(st.text(), st.floats(allow_nan=False)), st.lists(st.floats(0, 10)))
def test_whatever_is_in_a_label_every_line_can_be_read(values: dict[str, float], observed: list[float]) -> None:
    histogram = Histogram()
    for value in observed:
        histogram.observe(value)
    page = render(
        [
            labelled("gauge", "g", "Text.", "name", values),
            Family("h", "histogram", "Text.", histogram.samples({})),
        ]
    )
    lines = [line for line in page.removesuffix("\n").split("\n") if not line.startswith("# ")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found)
    numbers = [float(match[3]) for match in found if match]
    assert len(numbers) == len(values) + len(histogram.bounds) + 3
    assert numbers[-1] == len(observed)
    assert math.isclose(numbers[-2], sum(observed), rel_tol=1e-9, abs_tol=1e-9)


def test_health_tells_its_reasons() -> None:
    sick, unready = ["the model's thread has died"], ["no link to the relay"]
    assert health_page("/elsewhere", unhealthy=list, unready=list) is None
    page = health_page("/healthz", unhealthy=list, unready=lambda: unready)
    assert page is not None
    assert (page.status, page.body) == (200, "ok\n")
    page = health_page("/readyz", unhealthy=list, unready=lambda: unready)
    assert page is not None
    assert (page.status, page.body) == (503, "no link to the relay\n")
    for path in ("/healthz", "/readyz"):
        page = health_page(path, unhealthy=lambda: sick, unready=list)
        assert page is not None
        assert (page.status, page.body) == (503, "the model's thread has died\n")


async def test_a_nodes_status_port_shows_pages_and_lets_nobody_in() -> None:
    status = StatusServer(unhealthy=list, unready=lambda: ["loading"], families=lambda: [gauge("x", "X.", 5)])
    port = await status.listen("127.0.0.1", 0)
    serving = asyncio.create_task(status.serve())

    async def ask(path: str, *headers: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write("\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode())
        answer = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
        return answer

    assert (await ask("/readyz")).startswith("HTTP/1.1 503 ")
    metrics = await ask("/metrics")
    assert "Content-Type: text/plain; version=0.0.4" in metrics
    assert "\nx 5\n" in metrics
    assert "process_resident_memory_bytes" in metrics
    upgrade = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: " + "A" * 22 + "==",
    )
    assert (await ask("/", *upgrade, "Authorization: Bearer whatever-it-is")).startswith("HTTP/1.1 401 ")
    serving.cancel()
    await asyncio.wait([serving])
