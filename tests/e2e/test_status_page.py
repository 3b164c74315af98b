"""The status page in a headless Chromium: what a person sees and clicks, on real nodes and on 200 sessions."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, async_playwright, expect

from engine.scripted_logits import agreeing
from relay import api_page
from relay.api import Gateway
from relay.api_rounds import PARTS
from tests.e2e.conftest import ANSWER, SECRET, says
from wire.aio.trace import TraceWriter
from wire.messages import OpenSession, TextDelta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
ADMIN = "an-admin-secret-of-the-tests"
LONG = " ".join([ANSWER] * 12)
IMAGES = Path(__file__).parents[2] / "docs" / "img"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
expect.set_options(timeout=20_000)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    async with async_playwright() as playwright:
        # The sandbox needs user namespaces, which containers rarely grant; it only ever sees our own page.
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, chromium_sandbox=False, args=["--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        await browser.close()


@asynccontextmanager
async def page_of(browser: Browser, url: str, *, log_in: bool = True, **options: Any) -> AsyncIterator[Page]:
    """The page of a relay; fails if anything was written to the console or asked of another host."""
    context = await browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
    page = await context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url) else said.append(request.url))
    await page.goto(url)
    if log_in:
        await page.get_by_label("Admin secret").fill(ADMIN)
        await page.get_by_role("button", name="Show the status").click()
        await expect(page.locator("#connection")).to_have_text("live")
    yield page
    await context.close()
    assert said == []


@pytest.fixture
async def pipeline(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(api_page, "UPDATE_S", 0.1)
    return await in_process(
        says(LONG), drafter=agreeing(says(LONG), 0.8), growth="chain:2+10", admin_secret=ADMIN, pass_s=0.02,
        max_length=1024,
    )  # fmt: skip


class LedgerRounds(TraceWriter):
    """Keeps what the draft node's ledger has for each round, instead of writing it to a file."""

    def __init__(self) -> None:
        super().__init__(None)
        self.total_ms: dict[int, float] = {}

    @property
    def enabled(self) -> bool:
        return True

    def write(self, event: str, now: float, **fields: Any) -> None:
        if event == "round":
            self.total_ms[fields["timing"]["frame"]] = (fields["applied_at"] - fields["started_at"]) * 1e3


async def test_the_page_shows_nodes_sessions_rounds_and_a_shaded_answer(pipeline: Any, browser: Browser) -> None:
    ledger = pipeline.draft.trace = LedgerRounds()
    async with page_of(browser, pipeline.url) as page:
        nodes = page.locator("#nodes tr")
        await expect(nodes).to_have_count(2)
        await expect(nodes.nth(0)).to_contain_text("verify-land")
        await expect(page.locator("#map circle.verify")).to_have_count(1)
        await expect(page.locator("#no-sessions")).to_be_visible()

        await page.get_by_label("Question").fill("What is baked?")
        await page.get_by_label("Tokens", exact=True).fill("300")
        await page.get_by_role("button", name="Ask").click()
        row = page.locator("#sessions tr")
        await expect(row).to_have_count(1)
        await row.get_by_role("button").click()
        await expect(row).to_have_class("watched")
        await expect(page.locator("#waterfall g").nth(4)).to_be_attached()

        answer = page.locator("#answer")
        await expect(answer).to_have_attribute("aria-busy", "false")
        assert await answer.inner_text() == LONG[:300]
        assert await answer.locator(".token.draft").count() > 0
        await expect(page.locator("#answer-figures")).to_contain_text("Mean acceptance length")
        await expect(page.locator("#no-sessions")).to_be_visible()
        await expect(page.locator("#totals")).to_contain_text("Answers seen1")

        # The mean round's parts add up to its sum, as listed.
        texts = await page.locator("#parts dd").all_inner_texts()
        *parts, together, whole = [float(text.removesuffix(" ms")) for text in texts]
        assert len(parts) == len(PARTS)
        assert sum(parts) == pytest.approx(together, abs=0.01 * len(parts))
        assert together == pytest.approx(whole, abs=0.01)
        names = await page.locator("#parts dt").all_inner_texts()
        assert names[:-1] == [*PARTS, "sum of the parts"]
        # No two parts have the same colour.
        swatches = "all => all.map(each => getComputedStyle(each, '::before').backgroundColor)"
        assert len(set(await page.locator("#parts [class^=part-] dt").evaluate_all(swatches))) == len(PARTS)
        widths = await page.locator("#ledger rect").evaluate_all("bars => bars.map(bar => +bar.getAttribute('width'))")
        assert sum(widths) == pytest.approx(1000)
        # And so does every round in the waterfall, to the time that the draft node's own ledger has for it.
        await page.get_by_text("The same rounds in figures").click()
        rows = [row.split() for row in await page.locator("#round-figures tr").all_inner_texts()]
        assert len(rows) == await page.locator("#waterfall g").count() == 12
        for frame, _, _, _, parts_sum, _, whole, _ in rows:
            assert float(parts_sum) == pytest.approx(float(whole), abs=0.02)
            assert float(whole) == pytest.approx(ledger.total_ms[int(frame.removeprefix("#"))], abs=0.01)
        title = await page.locator("#waterfall title").first.text_content()
        assert title is not None
        assert "rounds over" in title


async def test_c054_the_playground_copes_with_a_stream_that_ends_with_usage(in_process: Any, browser: Browser) -> None:
    pipeline = await in_process(says(ANSWER), admin_secret=ADMIN)

    async def ask_for_usage(route: Route) -> None:
        body = route.request.post_data_json | {"stream_options": {"include_usage": True}}
        await route.continue_(post_data=json.dumps(body))

    async with page_of(browser, pipeline.url) as page:
        await page.route("**/v1/chat/completions", ask_for_usage)
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator("#answer-figures")).to_contain_text("Finished bystop")
        await expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
        assert await page.locator("#answer").inner_text() == ANSWER
        await expect(page.locator("#answer .error")).to_have_count(0)


async def test_a_wrong_secret_shows_nothing_and_the_right_one_can_be_forgotten(pipeline: Any, browser: Browser) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(pipeline.url)
    await page.get_by_label("Admin secret").fill("not-the-secret")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("The relay does not know this secret.")
    await expect(page.locator("#main")).to_be_hidden()
    await page.keyboard.type(ADMIN)
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_visible()
    await page.reload()
    await expect(page.locator("#main")).to_be_visible()
    await page.get_by_role("button", name="Forget the secret").click()
    await expect(page.locator("#main")).to_be_hidden()
    await page.reload()
    await expect(page.locator("#login")).to_be_visible()
    assert ADMIN not in page.url
    await context.close()


async def test_an_answer_that_is_stopped_is_cancelled(pipeline: Any, browser: Browser) -> None:
    async with page_of(browser, pipeline.url) as page:
        await page.get_by_label("Tokens", exact=True).fill("300")
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator("#answer .token").nth(3)).to_be_attached()
        await page.get_by_role("button", name="Stop").click()
        await pipeline.until(lambda: pipeline.open_slots() == (0, 0))
        await expect(page.locator("#answer .error")).to_have_count(0)
    await pipeline.until(lambda: pipeline.server.tap is None)  # nobody looks, so nobody counts


async def test_the_page_comes_back_when_the_relay_does(in_process: Any, browser: Browser) -> None:
    pipeline = await in_process(says(ANSWER), admin_secret=ADMIN)
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(pipeline.url)
    await page.get_by_label("Admin secret").fill(ADMIN)
    await page.keyboard.press("Enter")
    await expect(page.locator("#connection")).to_have_text("live")
    port = pipeline.gateway.port
    await pipeline.gateway.close()
    await expect(page.locator("#connection")).to_have_text("the relay does not answer; trying again")
    again = Gateway(pipeline.server)
    await again.start("127.0.0.1", port)
    await expect(page.locator("#connection")).to_have_text("live")
    await context.close()
    await again.close()


async def test_a_path_that_dies_without_a_word_is_noticed_and_dialled_again(
    in_process: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_page, "UPDATE_S", 3600.0)
    pipeline = await in_process(says(ANSWER), admin_secret=ADMIN)
    context = await browser.new_context()
    page = await context.new_page()
    await page.clock.install()
    await page.goto(pipeline.url)
    await page.get_by_label("Admin secret").fill(ADMIN)
    await page.keyboard.press("Enter")
    await expect(page.locator("#connection")).to_have_text("live")
    await page.clock.run_for(11_000)
    await expect(page.locator("#connection")).to_have_text("the relay does not answer; trying again")
    await page.clock.run_for(3_000)
    await expect(page.locator("#connection")).to_have_text("live")
    await context.close()


async def test_a_secret_that_no_header_can_carry_is_told_as_such(pipeline: Any, browser: Browser) -> None:
    async with page_of(browser, pipeline.url, log_in=False) as page:
        await page.get_by_label("Admin secret").fill("a secret – mistyped")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("A secret is printable ASCII without spaces.")
        await page.keyboard.type(f" {ADMIN} ")
        await page.keyboard.press("Enter")
        await expect(page.locator("#connection")).to_have_text("live")


async def test_text_is_never_markup(in_process: Any, browser: Browser) -> None:
    text = "<img src=x onerror=alert(1)><script>document.title='x'</script>"
    pipeline = await in_process(says(text), admin_secret=ADMIN)
    async with page_of(browser, pipeline.url) as page:
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator("#answer")).to_have_text(text)
        assert await page.title() == "Foredraft status"
        assert await page.locator("#answer img").count() == 0


async def test_two_hundred_sessions_are_listed_and_an_update_moves_no_row(
    in_process: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_page, "UPDATE_S", 0.2)
    pipeline = await in_process(says(ANSWER), admin_secret=ADMIN)
    # The node is real; the sessions only exist at the relay, where they are opened and answered piece by piece.
    client = pipeline.gateway.client
    monkeypatch.setattr(pipeline.verify, "on_frame", lambda frame, now: None)
    requests = [OpenSession(session=f"session-{i:03}", prompt="x: ") for i in range(200)]
    identity = pipeline.server.access.authenticate(SECRET)
    with client.exchange(requests, identity.credential):
        async with page_of(browser, pipeline.url) as page:
            rows = page.locator("#sessions tr")
            await expect(rows).to_have_count(200)
            await page.evaluate(
                """() => {
                    window.made = 0;
                    const count = (list) => { for (const each of list) window.made += each.addedNodes.length; };
                    for (const row of document.querySelectorAll("#sessions tr")) row.mark = true;
                    new MutationObserver(count).observe(document.getElementById("sessions"), { childList: true });
                }"""
            )
            for start in range(5):
                for i in range(200):
                    pipeline.verify.send(
                        TextDelta(session=f"session-{i:03}", start=start, tokens=(1,), text="a", sources=("draft",))
                    )
                await expect(rows.nth(199).locator("td").nth(4)).to_have_text(str(start + 1))
            assert await page.evaluate("window.made") == 0
            assert await rows.evaluate_all("rows => rows.every(row => row.mark)")
            order = await rows.locator("button").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
            assert len(order) == 200


async def test_it_reads_well_on_a_phone_in_the_dark_and_by_a_screen_reader(pipeline: Any, browser: Browser) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "is_mobile": True, "has_touch": True}
    async with page_of(browser, pipeline.url, **phone) as page:
        await expect(page.locator("#nodes tr")).to_have_count(2)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing to scroll sideways"
        ground, ink = await page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert contrast(ground, ink) > 7
        quiet = await page.locator("#totals dt").first.evaluate("each => getComputedStyle(each).color")
        raised = await page.locator("#totals div").first.evaluate("each => getComputedStyle(each).backgroundColor")
        assert contrast(quiet, raised) > 4.5
        tree = await page.locator("body").aria_snapshot()
        for text in (
            'heading "Foredraft" [level=1]', 'heading "Nodes" [level=2]', "status: live", 'region "Table of sessions"',
            'columnheader "Round trip"', 'rowheader "verify"', 'textbox "Question"', 'checkbox "Speculate" [checked]',
            'button "Ask"', "img \"Nodes by region",
        ):  # fmt: skip
            assert text in tree, tree
        await page.get_by_label("Tokens", exact=True).fill("300")
        await page.get_by_role("button", name="Ask").click()
        await page.locator("#sessions tr").get_by_role("button").click()
        await expect(page.locator("#waterfall g").nth(4)).to_be_attached()
        await page.get_by_text("The same rounds in figures").click()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        tree = await page.locator("#rounds").aria_snapshot()
        for text in (
            "began before the one before had ended", 'region "Table of rounds"', 'columnheader "Whole round"',
            'img "Parts of a mean round', "term: apply", "term: sum of the parts",
        ):  # fmt: skip
            assert text in tree, tree
        unnamed = await page.evaluate(
            """[...document.querySelectorAll("button, input, textarea")].filter(
                each => !each.labels?.length && !each.textContent && !each.getAttribute("aria-label")).length"""
        )
        assert unnamed == 0


async def test_the_policy_forbids_what_the_page_does_not_need(pipeline: Any, browser: Browser) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    response = await page.goto(pipeline.url)
    assert response is not None
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    refused = await page.evaluate(
        """() => new Promise(resolve => {
            document.addEventListener("securitypolicyviolation", event => resolve(event.violatedDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.head.append(script);
        })"""
    )
    assert refused.startswith("script-src")
    assert await page.evaluate("window.ran") is None
    await context.close()


def contrast(one: str, other: str) -> float:
    """Contrast of two colours as browsers give them, by WCAG's formula."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
