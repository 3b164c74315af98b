"""Make the pictures in docs/img: the status page and the client's panel, over the demo's models and an emulated link.

    python scripts/screenshots.py

Needs Chromium (on Debian: apt-get install chromium) and the development requirements. What is seen is what happened:
nothing in the pictures is made up.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright, expect
from rich.console import Console

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from relay.client import StreamClient
from relay.panel import PanelState, render
from scripts.demo import QUESTION
from scripts.demo_model import ensure_demo_checkpoint
from scripts.processes import ROOT, Part, Parts

IMAGES = ROOT / "docs" / "img"
REGIONS = {"verify": "eu-central-1", "draft": "us-east-1"}


async def start_pipeline(parts: Parts, args: argparse.Namespace) -> Part:
    """Relay with a gateway, a link emulator for each node, and the nodes; the relay's part."""
    model = str(ensure_demo_checkpoint())
    relay = await parts.start("relay", ["-m", "relay", "--port", "0", "--http-port", "0"], core=0)
    flags = {
        "verify": ["--model", model, "--max-length", "1024", "--max-rows", "4"],
        "draft": ["--model", model, "--drafter", f"distilled:{ROOT / 'models' / 'smollm2-135m-drafter'}",
                  "--growth", "chain:2+10", "--max-length", "1024"],
    }  # fmt: skip
    for role, delay_ms in (("verify", args.rtt_ms / 8), ("draft", args.rtt_ms * 3 / 8)):
        link = await parts.start(
            f"link-{role}",
            ["scripts/link_emulator.py", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{relay.port}",
             "--delay-ms", str(delay_ms)],
        )  # fmt: skip
        command = ["-m", f"node_{role}", "--relay", f"ws://127.0.0.1:{link.port}", "--region", REGIONS[role]]
        await parts.start(role, [*command, *flags[role]], core=0)
    return relay


async def open_page(browser: Browser, url: str, secret: str, *, width: int, height: int, dark: bool) -> Page:
    """The status page, connected."""
    page = await browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", device_scale_factor=1
    )
    await page.goto(url)
    await page.get_by_label("Admin secret").fill(secret)
    await page.get_by_role("button", name="Show the status").click()
    await expect(page.locator("#connection")).to_have_text("live")
    return page


async def ask_and_watch(page: Page) -> None:
    """Ask in the playground and look at the session's rounds until the answer is there."""
    await page.get_by_label("Question").fill(QUESTION)
    await page.get_by_label("Tokens", exact=True).fill("220")
    await page.get_by_role("button", name="Ask").click()
    row = page.locator("#sessions tr button")
    await expect(row).to_have_count(1, timeout=30_000)
    await row.click()
    await expect(page.locator("#waterfall g").nth(7)).to_be_attached(timeout=60_000)
    await expect(page.locator("#answer .token").nth(60)).to_be_attached(timeout=60_000)


async def shoot_panel(url: str, secret: str) -> None:
    """The client's panel at the end of an answer, as a picture of a terminal."""
    loop = asyncio.get_running_loop()
    state = PanelState(loop.time())
    async with StreamClient(url, secret=secret) as client:
        async for event in client.stream(messages=[("user", QUESTION)], max_tokens=90):
            state.take(event, loop.time())
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(render(state))
    console.save_svg(str(IMAGES / "panel.svg"), title="foredraft chat --panel")


async def run(args: argparse.Namespace) -> int:
    """Everything; the exit code."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("screenshots: no Chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="foredraft-") as folder:
        parts = Parts(Path(folder), secrets.token_urlsafe(24))
        try:
            relay = await start_pipeline(parts, args)
            url = f"http://127.0.0.1:{relay.ready['http_port']}"
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=chromium, chromium_sandbox=False, args=["--disable-gpu"]
                )
                page = await open_page(browser, url, parts.secret, width=1200, height=900, dark=False)
                await ask_and_watch(page)
                await page.screenshot(path=IMAGES / "status.png", full_page=True)
                await page.close()
                page = await open_page(browser, url, parts.secret, width=390, height=844, dark=True)
                await expect(page.locator("#no-sessions")).to_be_visible(timeout=60_000)
                await ask_and_watch(page)
                await page.locator("#rounds-title").scroll_into_view_if_needed()
                await page.screenshot(path=IMAGES / "status-phone.png", full_page=True)
                await page.close()
                await browser.close()
            await shoot_panel(f"ws://127.0.0.1:{relay.port}", parts.secret)
        finally:
            await asyncio.shield(parts.stop())
    print(*sorted(path.name for path in IMAGES.iterdir()))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt-ms", type=float, default=86.0, help="draft node to verify node and back")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
