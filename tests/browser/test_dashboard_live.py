"""The dashboard on a live server in a real browser: the feed, signing in by key, who may watch, an engine that dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from octavo.cli.servers import call_admin
from tests.browser.browsing import watched
from tests.browser.test_dashboard_page import drawn, pixels, until, value
from tests.fake_server import RealServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
KEY, OTHER = "sk-right-and-long", "sk-another-and-long"
RULES = [
    {"contains": "crash", "say": "on and on", "crash_after": 3},
    {"say": "on and on ", "finish": "length", "delay_ms": 15},
]


def script(folder: Path) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps(RULES))
    return f"scripted:{path}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("live")
    with RealServer(script(folder), folder / "log", "--max-num-seqs", "2") as running:
        yield running


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.yaml"
    keys.write_text(
        f"keys:\n- {{name: ann, key: {KEY}, dashboard: true}}\n- {{name: bob, key: {OTHER}}}\n", encoding="utf-8"
    )
    keys.chmod(0o600)
    with RealServer(script(folder), folder / "log", "--api-key-file", str(keys)) as running:
        yield running


class Asking:
    """Requests that go on meanwhile, in threads of their own."""

    def __init__(self, server: RealServer, number: int, max_tokens: int, text: str = "hello", key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        post = server.post
        self._threads = [
            threading.Thread(target=post, args=("/v1/chat/completions", body, 120.0, headers)) for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)


def live(page: Page) -> None:
    page.goto("/dashboard")
    until(page, "octavo.store.head !== null && document.getElementById('state').className === 'live'")


def totals(page: Page) -> dict[str, str]:
    return {row.split("\n")[0]: row.split("\n")[1] for row in page.locator("#totals div").all_inner_texts()}


def test_an_unused_server_says_so_and_totals_are_since_its_start_on_every_load(
    browser: Browser, tmp_path: Path
) -> None:
    name = "a-model-whose-name-has-fifty-characters-no-less-xx"
    rules = tmp_path / "script.json"
    rules.write_text(json.dumps([{"say": "on and on ", "finish": "length"}]))
    with (
        RealServer(f"scripted:{rules}", tmp_path / "log", "--served-model-name", name) as server,
        watched(browser, server.url, viewport={"width": 390, "height": 844}) as (page, _),
    ):
        live(page)
        until(page, "!document.getElementById('unused').hidden")
        assert "No requests yet" in page.inner_text("main") and not page.is_visible("#view-steps")
        assert totals(page)["finished"] == "0" and "NaN" not in page.inner_text("body")
        fits(page)
        command = page.inner_text("#first-request")
        assert name in command and server.url in command and "Authorization" not in command
        if shutil.which("curl"):
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
            assert json.loads(done.stdout)["model"] == name, done.stdout + done.stderr
        else:
            Asking(server, 1, 16).join()
        until(page, "document.getElementById('unused').hidden && octavo.store.steps.count > 0")
        assert page.is_visible("#view-steps") and pixels(page, "#timeline") > 3

        Asking(server, 3, 1100, "again and again " * 40).join()  # more steps than the engine keeps
        found = call_admin(server.admin, "statistics")["scheduler"]
        hits = 100 * found["prefix_hit_tokens"] / found["prefix_queried_tokens"]
        seen = []
        for _ in range(2):
            live(page)
            until(page, "octavo.store.steps.count > 0 && document.querySelector('#totals dd') !== null")
            assert value(page, "store.steps.number[0]") > 0, "the first steps are not kept"
            until(page, "document.querySelectorAll('#totals div')[8]?.innerText === 'finished\\n4\\nsince start'")
            seen.append(totals(page))
        for figures in seen:
            assert figures["finished"] == str(sum(found["finished"].values())) == "4"
            assert float(figures["prefix hits"].removesuffix(" %")) == pytest.approx(hits, abs=0.6)


def fits(page: Page) -> None:
    """Nothing is wider than the screen, in any view, with the menu closed or open; the header is one line."""
    wide = "document.documentElement.scrollWidth - innerWidth"
    for number in "12345":
        page.keyboard.press(number)
        drawn(page)
        assert page.evaluate(wide) <= 0, number
    header = page.locator("header.top").bounding_box()
    assert header is not None and header["height"] < 60 and not page.is_visible("#open")
    page.click("#menu")
    assert page.is_visible("#open") and page.is_visible("#filter") and page.evaluate(wide) <= 0
    page.keyboard.press("Escape")
    assert not page.is_visible("#open")
    page.keyboard.press("1")


def test_an_unused_server_with_keys_says_how_to_send_one(browser: Browser, keyed: RealServer) -> None:
    with watched(browser, keyed.url) as (page, watch):
        watch.allowed.append("401")
        page.goto("/dashboard")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#unused:visible")
        assert "Bearer $OCTAVO_API_KEY" in page.inner_text("#first-request")
        assert "export OCTAVO_API_KEY=" in page.inner_text("#first-key")


def test_I06_the_dashboard_follows_a_live_server(browser: Browser, server: RealServer) -> None:
    with watched(browser, server.url) as (page, _):
        live(page)
        asking = Asking(server, 4, 150)
        until(page, "octavo.store.steps.run.subarray(0, octavo.store.steps.count).some((run) => run === 2)")
        until(page, "octavo.store.queues.some((look) => look.total >= 1)")
        page.keyboard.press("4")
        until(page, "octavo.views.lanes.listed.length >= 4")
        assert pixels(page, "#lanes") > 4
        asking.join()
        until(page, "[...octavo.store.requests.values()].filter((request) => request.finish === 'length').length >= 4")
        page.keyboard.press("1")
        assert pixels(page, "#timeline") > 3
        assert page.inner_text("#state") == "live"


def test_I06_pause_keeps_what_comes_and_end_goes_live_again(browser: Browser, server: RealServer) -> None:
    with watched(browser, server.url) as (page, _):
        live(page)
        asking = Asking(server, 2, 200)
        until(page, "octavo.store.steps.count > 5")
        page.keyboard.press(" ")
        at, number = value(page, "time"), value(page, "store.steps.count")
        assert page.inner_text("#play") == "Play" and "paused" in page.inner_text("#state")
        until(page, f"octavo.store.steps.count > {number} + 10")
        drawn(page)
        assert value(page, "time") == at
        page.keyboard.press("ArrowLeft")
        assert value(page, "time") < at
        page.click("#to-end")
        assert value(page, "mode") == "live"
        until(page, f"octavo.time > {at}")
        asking.join()


def test_I06_a_waiting_request_is_explained_by_the_engine(browser: Browser, server: RealServer) -> None:
    with watched(browser, server.url) as (page, watch):
        watch.allowed.append("404")  # it may have begun by the time that it is asked about
        live(page)
        asking = Asking(server, 5, 250)
        page.keyboard.press("3")
        until(page, "document.querySelector('#waiting tbody tr') !== null")
        page.locator("#waiting tbody tr button").last.click()
        until(page, "document.querySelector('.explained') !== null")
        assert page.inner_text(".explained").strip()
        asking.join()


def test_I06_the_feed_outlives_an_engine_that_dies(browser: Browser, server: RealServer) -> None:
    with watched(browser, server.url) as (page, _):
        live(page)
        life = value(page, "store.head.life")
        Asking(server, 1, 20, "crash").join()
        until(page, f"octavo.store.head.life !== '{life}'")
        Asking(server, 1, 5).join()
        until(page, "document.getElementById('state').className === 'live'")


def test_I06_signing_in_by_key_shows_the_dashboard_and_signing_out_ends_it(browser: Browser, keyed: RealServer) -> None:
    with watched(browser, keyed.url) as (page, watch):
        watch.allowed.append("401")
        page.goto("/dashboard")
        page.fill("#key", "sk-wrong-and-long")
        page.click("button[type=submit]")
        assert "no valid key" in page.inner_text("[role=alert]")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard#steps")
        until(page, "octavo.store.head !== null")
        assert page.inner_text("#state") == "live"
        [session] = [each for each in page.context.cookies() if each["httpOnly"]]
        assert session["sameSite"] == "Strict" and KEY not in session["value"]
        assert session["name"] not in page.evaluate("document.cookie")
        page.click("#logout button")
        page.wait_for_url("**/login")
        page.goto("/dashboard")
        assert page.is_visible("#key")


def test_I06_a_key_without_the_right_is_told(browser: Browser, keyed: RealServer) -> None:
    with watched(browser, keyed.url) as (page, watch):
        watch.allowed += ["401", "403"]
        page.goto("/dashboard")
        page.fill("#key", OTHER)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard#steps")
        until(page, "window.octavo && document.getElementById('state').className === 'refused'")
        assert "dashboard = true" in page.inner_text("#state")


def test_I06_another_sites_page_cannot_use_the_session(browser: Browser, keyed: RealServer, server: RealServer) -> None:
    """The page of another origin (another port is another origin, though the same site) posts with the cookie."""
    with watched(browser, keyed.url) as (page, watch):
        watch.allowed += ["401", "asks", "CORS", "Failed to load", "ERR_FAILED", "connect-src", "violates"]
        page.goto("/dashboard")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard#steps")
        request = urllib.request.Request(f"{keyed.url}/v1/models")
        [cookie] = [each for each in page.context.cookies() if each["httpOnly"]]
        request.add_header("cookie", f"{cookie['name']}={cookie['value']}")
        request.add_header("sec-fetch-site", "same-site")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request)
        request.remove_header("Sec-fetch-site")
        request.add_header("sec-fetch-site", "same-origin")
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200


def test_I06_a_file_can_be_opened_on_a_live_page_and_live_comes_back(
    browser: Browser, server: RealServer, tmp_path: Path
) -> None:
    path = tmp_path / "frames.jsonl"
    with watched(browser, server.url) as (page, _):
        live(page)
        frames = page.evaluate("[octavo.store.head, { k: 'end', t: octavo.store.head.t + 1 }]")
        frames[0]["source"] = "recording"
        path.write_text("\n".join(map(json.dumps, frames)))
        page.set_input_files("#file", path)
        until(page, "document.getElementById('state').className === 'paused'")
        page.click("#live")
        until(page, "octavo.mode === 'live' && octavo.store.head?.source === 'live'")
        assert not page.is_visible("#live")
        page.set_input_files("#file", path)
        until(page, "document.getElementById('state').className === 'paused'")
        page.keyboard.press("l")
        until(page, "octavo.mode === 'live'")
