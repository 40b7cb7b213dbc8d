"""The dashboard in a real browser, with a simulation in the page itself: each control does what it says.

Every test fails where the console has an error, the page's policy forbade something, or another server was asked.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo.dashboard.page import write_page
from tests.browser.browsing import Watch, watched
from tests.browser.frames_file import make_frames

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
VIEWS = ["steps", "pool", "queue", "lanes", "plots"]


class Recorded:
    """Where the page is, and its frames."""

    def __init__(self, folder: Path) -> None:
        self.jsonl = folder / "frames.jsonl"
        self.frames = make_frames(self.jsonl, "--steps", "150", "--running", "24", "--waiting", "60")
        self.html = folder / "page.html"
        write_page(self.frames, self.html)
        self.steps = [frame for frame in self.frames if frame["k"] == "step"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("frames"))


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Iterator[tuple[Page, Watch]]:
    with watched(browser, "file://") as pair:
        yield pair


@pytest.fixture
def page(opened: tuple[Page, Watch], recorded: Recorded) -> Iterator[Page]:
    """The page as it is when it was just opened."""
    page, watch = opened
    page.goto("about:blank")
    show(page, recorded)
    yield page
    assert watch.problems == []


def show(page: Page, recorded: Recorded) -> None:
    page.goto(recorded.html.as_uri())
    until(page, f"octavo.store.numAll === {len(recorded.steps)} && octavo.mode === 'paused'")
    drawn(page)


def until(page: Page, expression: str) -> None:
    """Wait for something to be so. (The library's own way asks for eval, which the page's policy forbids.)"""
    is_so = page.evaluate(
        """async (limit) => {
          const end = performance.now() + limit;
          while (performance.now() < end) {
            if (HOLDS) return true;
            await new Promise((go) => setTimeout(go, 20));
          }
          return false;
        }""".replace("HOLDS", expression),
        20_000,
    )
    assert is_so, expression


def drawn(page: Page) -> None:
    """Wait until what was asked for is on the screen."""
    page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")


def value(page: Page, of: str) -> Any:
    return page.evaluate(f"octavo.{of}")


def pixels(page: Page, selector: str) -> int:
    """How many different colours a drawing has, once it is drawn: one means that nothing was drawn within seconds."""
    drawn(page)
    return int(
        page.evaluate(
            """async (selector) => {
          const canvas = document.querySelector(selector), copy = document.createElement("canvas");
          const colours = () => {
            [copy.width, copy.height] = [canvas.width, canvas.height];
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, 0, 0);
            return new Set(new Uint32Array(context.getImageData(0, 0, copy.width, copy.height).data.buffer)).size;
          };
          const end = performance.now() + 5000;
          while (colours() < 2 && performance.now() < end) await new Promise((go) => setTimeout(go, 20));
          return colours();
        }""",
            selector,
        )
    )


def point(page: Page, selector: str, x: float = 0.6, y: float = 0.5) -> str:
    """Point at a share of a drawing, where it lies once the page stopped moving; what is told there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        box = page.locator(selector).bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
        drawn(page)
        if page.locator(selector).bounding_box() == box and page.is_visible("#tip"):
            return page.inner_text("#tip")
        page.mouse.move(2, 2)  # else the next move is none
        drawn(page)
    return ""


def test_I06_a_page_with_a_simulation_shows_it_without_a_server(page: Page, recorded: Recorded) -> None:
    assert f"simulation, {len(recorded.steps)} steps" in page.inner_text("#state")
    until(page, "document.querySelector('h1').textContent.includes('a made-up model')")  # with the totals
    assert not page.is_visible("#unused")
    assert value(page, "time") == pytest.approx(value(page, "store.end"))
    assert not page.is_visible("#chat") and not page.is_visible("#logout")


@pytest.mark.parametrize("number, name", list(enumerate(VIEWS, 1)))
def test_I06_each_view_is_shown_by_its_tab_and_by_its_key(page: Page, number: int, name: str) -> None:
    other = VIEWS[number % 5]
    page.click(f"#tab-{other}")
    page.keyboard.press(str(number))
    assert page.is_visible(f"#view-{name}") and not page.is_visible(f"#view-{other}")
    page.click(f"#tab-{other}")
    page.click(f"#tab-{name}")
    assert page.get_attribute(f"#tab-{name}", "aria-selected") == "true"
    assert page.url.endswith(f"#{name}")
    page.keyboard.press("ArrowRight")
    assert page.is_visible(f"#view-{other}") and page.evaluate("document.activeElement.id") == f"tab-{other}"


def test_I06_totals_are_those_of_the_frames(page: Page, recorded: Recorded) -> None:
    last = recorded.steps[-1]
    until(page, f"document.querySelectorAll('#totals div')[4]?.children[1].textContent === '{last['run']}'")
    rows = [line.split("\n") for line in page.locator("#totals div").all_inner_texts()]
    shown = {name: value for name, value, _ in rows}
    assert {name: over for name, _, over in rows} == {
        **dict.fromkeys(("decode tokens/s", "prefill tokens/s", "step p50"), "last 5 s"),
        "first token p50": "last 60 s",
        **dict.fromkeys(("running", "waiting", "swapped", "KV in use"), "now"),
        **dict.fromkeys(("finished", "prefix hits", "preemptions"), "since start"),
    }
    assert (shown["running"], shown["waiting"]) == (str(last["run"]), str(last["wait"]))
    used = 100 * sum(last["used"]) / sum(recorded.frames[0]["limits"]["num_blocks"])
    assert float(shown["KV in use"].removesuffix(" %")) == pytest.approx(used, abs=0.6)
    [*_, totals] = [step["totals"] for step in recorded.steps if "totals" in step]
    ended = sum(event[0] == "finished" for step in recorded.steps for event in step.get("ev", []))
    assert shown["finished"] == str(totals["finished"]) and totals["finished"] >= ended
    hits = 100 * totals["found"] / totals["looked_up"]
    assert float(shown["prefix hits"].removesuffix(" %")) == pytest.approx(hits, abs=0.6)


def test_I06_the_timeline_draws_steps_and_tells_their_numbers(page: Page, recorded: Recorded) -> None:
    assert pixels(page, "#timeline") > 5
    page.evaluate("octavo.span = 0.5; octavo.draw()")
    told = point(page, "#timeline", 0.7, 0.5)
    (number,) = map(int, re.findall(r"step (\d+)", told)[:1])
    step = next(step for step in recorded.steps if step["n"] == number)
    assert re.search(rf"decode tokens\s+{step['tok'][1]}\b", told) and "forward" in told
    page.mouse.move(5, 5)
    until(page, "document.getElementById('tip').hidden")


def test_I06_where_the_time_went_is_told_as_a_table(page: Page, recorded: Recorded) -> None:
    until(page, f"document.getElementById('step-facts').textContent.startsWith('{len(recorded.steps)} steps')")
    rows = {row.split("\t")[0].strip(): row.split("\t")[1] for row in page.locator("#parts tbody tr").all_inner_texts()}
    whole = sum(step["s"] + step["idle"] for step in recorded.steps)
    forward = sum(step["parts"][2] or 0 for step in recorded.steps)
    assert float(rows["forward"].removesuffix(" %")) == pytest.approx(100 * forward / whole, abs=1.0)
    assert f"{len(recorded.steps)} steps" in page.inner_text("#step-facts")


def test_idle_time_before_the_window_is_not_counted_into_it(
    browser: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    """An engine that was idle for minutes, then busy half of the time: the first step's idle time is clipped."""
    [head] = [frame for frame in recorded.frames if frame["k"] == "head"]
    head = {**head, "t": 0.0, "slots": [], "open": []}
    step = {"k": "step", "s": 0.01, "parts": [0, 0, 0.01, 0, 0], "tok": [0, 1, 0, 0, 1], "rows": [], "run": 1}
    step |= {"wait": 0, "used": [1], "cached": [0]}
    steps = [{**step, "n": i, "t": 300 + 0.02 * i, "idle": 0.01 if i else 299.99} for i in range(50)]
    path = tmp_path / "idle.html"
    write_page([head, *steps, {"k": "end", "t": 301.0}], path)
    with watched(browser, "file://") as (page, _):
        page.goto(path.as_uri())
        until(page, "octavo.store.numAll === 50 && octavo.mode === 'paused'")
        page.evaluate("octavo.span = 1.2; octavo.moveTo(301)")  # from 299.8 on
        until(page, "document.querySelector('#parts tbody td')?.textContent === '42 %'")
        told = dict(row.split("\t")[:2] for row in page.locator("#parts tbody tr").all_inner_texts())
        assert {part.strip(): share for part, share in told.items()} == {"forward": "42 %", "idle": "58 %"}
        assert "p50 10.0 ms, p95 10.0 ms, longest 10.0 ms" in page.inner_text("#step-facts")


def test_the_colours_of_the_pool_are_in_the_legend_and_quantiles_have_their_names(page: Page) -> None:
    legend = page.inner_text("#view-steps .legend").split("\n")
    assert legend[-2:] == ["KV in use", "cached"]
    page.click("#tab-plots")
    captions = page.locator("figcaption").all_inner_texts()
    assert sum("p50" in caption and "p95" in caption for caption in captions) == 3
    assert not any("half" in caption or "95 of" in caption for caption in captions)


def test_I06_the_wheel_zooms_around_the_pointer_and_dragging_moves(page: Page) -> None:
    span, time = value(page, "span"), value(page, "time")
    point(page, "#timeline", 0.5)
    page.mouse.wheel(0, -300)
    until(page, f"octavo.span < {span} * 0.9")
    assert value(page, "time") < time
    before = value(page, "time")
    page.mouse.down()
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50, steps=4)
    page.mouse.up()
    assert value(page, "time") < before
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 50)
    assert value(page, "time") < before


def test_I06_buttons_zoom_and_fit(page: Page) -> None:
    whole = value(page, "span")
    page.click("#zoom-in")
    assert value(page, "span") == pytest.approx(whole / 2)
    drawn(page)
    assert page.evaluate("document.getElementById('span').value").endswith("s")
    page.click("#zoom-out")
    assert value(page, "span") == pytest.approx(whole, rel=0.02)
    for _ in range(3):
        page.click("#zoom-in")
    page.click("#fit")
    assert value(page, "span") == pytest.approx(whole)


def test_I06_buttons_go_to_the_ends_and_by_steps(page: Page, recorded: Recorded) -> None:
    page.click("#to-begin")
    assert value(page, "time") == pytest.approx(value(page, "store.begin"))
    times = [step["t"] for step in recorded.steps]
    page.click("#step-on")
    assert value(page, "time") == pytest.approx(times[1], abs=1e-6)
    page.click("#step-on")
    page.click("#step-back")
    assert value(page, "time") == pytest.approx(times[1], abs=1e-6)
    page.click("#to-end")
    assert value(page, "time") == pytest.approx(value(page, "store.end"))


def test_I06_play_goes_on_at_the_chosen_speed_and_stops_at_the_end(page: Page) -> None:
    assert page.inner_text("#play") == "Play"
    page.select_option("#speed", "0.25")
    page.click("#play")
    assert page.inner_text("#play") == "Pause"
    until(page, "octavo.time > octavo.store.begin + 0.05")
    page.click("#play")
    stopped = value(page, "time")
    assert page.inner_text("#play") == "Play" and stopped < value(page, "store.end")
    drawn(page)
    assert value(page, "time") == stopped
    page.select_option("#speed", "100")
    page.click("#play")
    until(page, "octavo.mode === 'paused' && octavo.time === octavo.store.end")


def test_I06_the_bar_scrubs_by_pointer_and_by_keys(page: Page) -> None:
    assert pixels(page, "#scrub") > 2
    box = page.locator("#scrub").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 10)
    begin, end = value(page, "store.begin"), value(page, "store.end")
    assert value(page, "time") == pytest.approx((begin + end) / 2, abs=(end - begin) * 0.01)
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 10)
    page.mouse.up()
    assert value(page, "time") == pytest.approx(begin + (end - begin) / 4, abs=(end - begin) * 0.01)
    page.focus("#scrub")
    before = value(page, "time")
    page.keyboard.press("ArrowRight")
    assert value(page, "time") > before
    drawn(page)
    assert float(page.get_attribute("#scrub", "aria-valuenow") or "nan") == pytest.approx(
        value(page, "time") - begin, abs=0.1
    )
    assert page.get_attribute("#scrub", "role") == "slider"


def test_I06_keys_do_what_the_help_says(page: Page) -> None:
    page.keyboard.press("Home")
    assert value(page, "time") == pytest.approx(value(page, "store.begin"))
    page.keyboard.press("Shift+ArrowRight")
    assert value(page, "time") == pytest.approx(value(page, "store.begin") + value(page, "span") / 10)
    at = value(page, "time")
    page.keyboard.press("ArrowRight")
    assert value(page, "time") > at
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert value(page, "time") < at + 1e-3
    page.keyboard.press("End")
    assert value(page, "time") == pytest.approx(value(page, "store.end"))
    whole = value(page, "span")
    page.keyboard.press("+")
    assert value(page, "span") == pytest.approx(whole / 2)
    page.keyboard.press("-")
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert value(page, "span") == pytest.approx(whole)
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert value(page, "mode") == "playing"
    page.keyboard.press(" ")
    assert value(page, "mode") == "paused"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("3 1")
    assert page.is_visible("#view-steps"), "what is typed into the filter is no command"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "filter"


def test_I06_a_file_is_asked_for_by_button_and_by_key(page: Page) -> None:
    page.evaluate(
        """() => document.getElementById("file").addEventListener("click", (event) => {
          window.asked = (window.asked || 0) + 1;
          event.preventDefault();
        })"""
    )
    page.click("#open")
    page.keyboard.press("o")
    assert page.evaluate("window.asked") == 2


def test_I06_help_opens_and_closes(page: Page) -> None:
    page.keyboard.press("?")
    assert page.is_visible("#keys") and "Pictures cost" in page.inner_text("#cost")
    page.keyboard.press("2")
    assert not page.is_visible("#view-pool"), "behind the help nothing moves"
    page.keyboard.press("Escape")
    assert not page.is_visible("#keys")
    page.click("#help")
    page.click("#keys-close")
    assert not page.is_visible("#keys")


def test_I06_light_and_dark_follow_the_system_until_chosen(browser: Browser, recorded: Recorded) -> None:
    with watched(browser, "file://", color_scheme="dark") as (page, _):
        show(page, recorded)
        ground = "getComputedStyle(document.body.parentElement).backgroundColor"
        dark = page.evaluate(ground)
        page.click("#theme")
        light = page.evaluate(ground)
        assert dark != light and value(page, "palette.isDark") is False
        page.keyboard.press("d")
        assert page.evaluate(ground) == dark
        page.keyboard.press("d")
        show(page, recorded)
        assert page.evaluate(ground) == light, "the choice is kept"
    with watched(browser, "file://", color_scheme="light") as (page, _):
        show(page, recorded)
        assert page.evaluate(ground) == light
        page.emulate_media(color_scheme="dark")
        until(page, "octavo.palette.isDark")
        assert page.evaluate(ground) == dark


def test_I06_blocks_are_shown_by_who_holds_them(page: Page, recorded: Recorded) -> None:
    page.keyboard.press("2")
    assert pixels(page, "#pool") > 8
    look = [frame for frame in recorded.frames if frame["k"] == "blocks"][-1]
    legend = page.inner_text("#pool-legend")
    assert "free" in legend and "shared" in legend and "cached" in legend and "host tier" in legend
    told = point(page, "#pool", 0.02, 0.02)
    assert re.match(r"blocks? 0\b", told) and "is" in told
    rows = page.locator("#owners tbody tr")
    assert rows.count() > 3
    first = rows.nth(0)
    assert int(first.locator("td").nth(2).inner_text()) >= int(rows.nth(1).locator("td").nth(2).inner_text())
    first.locator("button").click()
    drawn(page)
    assert value(page, "views.pool.chosen") == first.get_attribute("data-name")
    assert first.locator("button").get_attribute("aria-pressed") == "true"
    first.locator("button").click()
    drawn(page)
    assert value(page, "views.pool.chosen") == ""
    first.locator("button").dblclick()
    assert page.inner_text("#details-name") == first.get_attribute("data-name")
    assert look["groups"][0]["n"] == recorded.frames[0]["limits"]["num_blocks"][0]


def test_I06_blocks_and_queue_are_those_of_the_time_that_is_shown(page: Page, recorded: Recorded) -> None:
    page.keyboard.press("3")
    looks = [frame for frame in recorded.frames if frame["k"] == "queue"]
    middle = looks[len(looks) // 2]
    page.evaluate(f"octavo.moveTo({middle['t']} + 1e-6)")
    drawn(page)
    assert f"{middle['total']} wait" in page.inner_text("#queue-note")
    shown = [row.get_attribute("data-name") for row in page.locator("#waiting tbody tr").all()]
    assert shown == [each[0] for each in middle["top"]]
    page.keyboard.press("Home")
    drawn(page)
    assert page.inner_text("#queue-note").startswith(("No look", "1", "2", "3", "4", "5", "6", "7", "8", "9", "Nobody"))


def test_I06_the_queue_is_sorted_by_every_column_and_says_why(page: Page, recorded: Recorded) -> None:
    page.keyboard.press("3")
    look = [frame for frame in recorded.frames if frame["k"] == "queue"][-1]
    for column in range(7):
        button = page.locator("#waiting th button").nth(column)
        for direction, is_down in (("ascending", False), ("descending", True)):
            button.click()
            drawn(page)
            assert page.locator("#waiting th").nth(column).get_attribute("aria-sort") == direction
            names = [row.get_attribute("data-name") for row in page.locator("#waiting tbody tr").all()]
            by_name = {each[0]: each[column] for each in look["top"]}
            values = [by_name[str(name)] for name in names]
            if column > 2:
                assert values == sorted(values, reverse=is_down)
            assert len(names) == len(look["top"])
        button.click()
        drawn(page)
    assert [row.get_attribute("data-name") for row in page.locator("#waiting tbody tr").all()] == [
        each[0] for each in look["top"]
    ]
    counts = [int(each) for each in page.locator("#reasons b").all_inner_texts()]
    assert sum(counts) == look["total"] and counts == sorted(counts, reverse=True)


def test_I06_a_request_tells_its_story(page: Page, recorded: Recorded) -> None:
    page.keyboard.press("3")
    page.locator("#waiting tbody tr button").nth(0).click()
    name = page.inner_text("#details-name")
    assert page.evaluate("document.activeElement.id") == "details-close"
    assert "prompt" in page.inner_text("#details-facts")
    events = [event for step in recorded.steps for event in step.get("ev", []) if event[1] == name]
    told = page.locator("#details-events li").all_inner_texts()
    assert len(told) == len(events)
    assert all(event[0].replace("_", " ") in line for event, line in zip(events, told, strict=True))
    page.keyboard.press("Escape")
    assert not page.is_visible("#details")
    page.locator("#waiting tbody tr").nth(1).click()
    page.click("#details-close")
    assert not page.is_visible("#details")


def test_I06_the_filter_narrows_queue_and_lanes(page: Page, recorded: Recorded) -> None:
    page.keyboard.press("3")
    look = [frame for frame in recorded.frames if frame["k"] == "queue"][-1]
    tenant = look["top"][0][1]
    page.fill("#filter", tenant)
    drawn(page)
    names = [row.get_attribute("data-name") for row in page.locator("#waiting tbody tr").all()]
    assert names == [each[0] for each in look["top"] if tenant in each[1]]
    page.click("#tab-lanes")
    drawn(page)
    assert value(page, f"views.lanes.listed.every((request) => request.tenant.includes('{tenant}'))")
    page.fill("#filter", "nobody is named so")
    drawn(page)
    assert page.inner_text("#lanes-note").startswith("0 requests")


def test_I06_lanes_show_requests_from_arrival_to_end(page: Page, recorded: Recorded) -> None:
    page.keyboard.press("4")
    assert pixels(page, "#lanes") > 5
    number = value(page, "views.lanes.listed.length")
    arrivals = sum(len(step.get("in", [])) for step in recorded.frames if step["k"] in ("step", "note"))
    assert number == arrivals + len(recorded.frames[0]["open"])
    assert page.inner_text("#lanes-note").startswith(f"{number} requests")
    told = point(page, "#lanes", 0.5, 0.02)
    assert told.startswith(value(page, "views.lanes.listed[0].name")) and "tenant" in told
    page.check("#hide-ended")
    drawn(page)
    assert value(page, "views.lanes.listed.every((request) => !(request.end <= octavo.time))")
    page.uncheck("#hide-ended")
    page.evaluate("document.getElementById('lanes-scroller').scrollTop = 180")
    drawn(page)
    box = page.locator("#lanes-scroller").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 40, box["y"] + 8)
    assert page.inner_text("#details-name") == value(page, "views.lanes.listed[10].name")


def test_I06_lanes_know_what_a_request_did(page: Page, recorded: Recorded) -> None:
    """First tokens and ends as the frames have them."""
    ends = {event[1]: event[2] for step in recorded.steps for event in step.get("ev", []) if event[0] == "finished"}
    name, fields = next((name, fields) for name, fields in ends.items() if fields.get("n", 0) > 1)
    request = page.evaluate("(name) => ({...octavo.store.requests.get(name)})", name)
    assert request["end"] == pytest.approx(fields["t"]) and request["finish"] == fields["finish"]
    assert request["tokens"] == fields["n"] and request["arrival"] <= request["first"] <= request["end"]
    assert all(a <= b for a, b in zip(request["starts"], request["ends"], strict=True))
    assert request["starts"] == sorted(request["starts"])


@pytest.mark.parametrize("plot", ["tokens", "load", "pool", "steps", "ttft", "tpot"])
def test_I06_plots_are_drawn_and_tell_their_numbers(page: Page, plot: str) -> None:
    page.keyboard.press("5")
    assert pixels(page, f"#plot-{plot}") > 3
    told = point(page, f"#plot-{plot}", 0.8, 0.4)
    assert re.search(r"\d", told)
    page.mouse.move(2, 2)
    until(page, "document.getElementById('tip').hidden")


def test_I06_a_file_is_opened_by_choosing_and_by_dropping(page: Page, recorded: Recorded, tmp_path: Path) -> None:
    half = recorded.frames[: len(recorded.frames) // 2]
    steps = sum(frame["k"] == "step" for frame in half)
    packed = tmp_path / "half.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, half)).encode()))
    page.set_input_files("#file", packed)
    until(page, f"octavo.store.numAll === {steps}")
    assert "half.jsonl.gz" in page.inner_text("#state")
    page.set_input_files("#file", recorded.html)
    until(page, f"octavo.store.numAll === {len(recorded.steps)}")
    text = recorded.jsonl.read_text()
    page.evaluate(
        """(text) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([text], "dropped.jsonl"));
          document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        text,
    )
    until(page, "document.getElementById('state').textContent.includes('dropped.jsonl')")


@pytest.mark.parametrize("content", [b"no frames", b"{}", b"[]", b"\x1f\x8bbroken", b"<html></html>", b""], ids=repr)
def test_a_file_that_is_none_is_told_and_changes_nothing(page: Page, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    before = value(page, "store.numAll")
    page.set_input_files("#file", path)
    until(page, "document.getElementById('state').className === 'trouble'")
    assert "odd.jsonl cannot be shown" in page.inner_text("#state")
    assert value(page, "store.numAll") == before


def test_I06_the_page_fits_a_narrow_screen(browser: Browser, recorded: Recorded) -> None:
    with watched(browser, "file://", viewport={"width": 320, "height": 640}) as (page, _):
        show(page, recorded)
        for number in range(1, 6):
            page.click(f"#tab-{VIEWS[number - 1]}")
            drawn(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, VIEWS[number - 1]


def test_names_of_requests_are_text_and_nothing_else(browser: Browser, recorded: Recorded, tmp_path: Path) -> None:
    odd = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>"
    frames = json.loads(json.dumps(recorded.frames).replace("chatcmpl-000000", odd))
    path = tmp_path / "odd.html"
    write_page(frames, path)
    with watched(browser, "file://") as (page, _):
        page.goto(path.as_uri())
        until(page, f"octavo.store.numAll === {len(recorded.steps)}")
        for number in "12345":
            page.keyboard.press(number)
            drawn(page)
        page.evaluate("(name) => octavo.showRequest(name)", odd)
        assert page.inner_text("#details-name") == odd
        assert page.evaluate("window.pwned") is None


def test_motion_is_reduced_where_that_is_wanted(browser: Browser, recorded: Recorded) -> None:
    with watched(browser, "file://", reduced_motion="reduce") as (page, _):
        show(page, recorded)
        assert value(page, "calm.matches") is True


def test_I06_every_control_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, canvas, a, [role=slider]")]
          .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length))
          .map((each) => each.outerHTML)"""
    )
    assert nameless == []
