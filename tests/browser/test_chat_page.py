"""The chat page in a real browser, against a real server: each control does what it says.

Every test fails where the console has an error, the page's policy forbade something, or another server was asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.browsing import Watch, watched
from tests.browser.scripts import script
from tests.fake_server import RealServer
from tests.server.several_models import SeveralModels, write_script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
ANSWER = "#messages .message.assistant"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("chat")
    with RealServer(script(folder), folder / "log", "--max-num-seqs", "8") as running:
        yield running


class Chat:
    """The page, as somebody uses it. `bodies` are the requests for answers that it sent."""

    def __init__(self, page: Page, watch: Watch) -> None:
        self.page, self.watch = page, watch
        self.bodies: list[dict[str, Any]] = []
        page.on("request", self._note)
        page.goto("/")
        page.wait_for_selector("#model option", state="attached")

    def _note(self, request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def send(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def say(self, text: str) -> Locator:
        """Send, and wait for the end of the answer."""
        number = self.page.locator(ANSWER).count()
        self.send(text)
        return self.ended(number)

    def ended(self, number: int) -> Locator:
        answer = self.page.locator(ANSWER).nth(number)
        answer.wait_for()
        self.page.wait_for_selector("#send:visible")
        return answer

    def settings(self) -> None:
        self.page.click("#toggle-settings")
        self.page.wait_for_selector("#settings-panel:visible")

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def do(self, action: str, within: str = "#messages") -> None:
        self.page.click(f'{within} [data-action="{action}"]:visible')


@pytest.fixture
def chat(browser: Browser, server: RealServer) -> Iterator[Chat]:
    with watched(browser, server.url, permissions=["clipboard-read", "clipboard-write"]) as (page, watch):
        yield Chat(page, watch)


def until(is_so: Callable[[], bool]) -> None:
    """Look again and again; the tests' own time limit ends it."""
    while not is_so():
        pass


def clipboard(page: Page) -> str:
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


# --- what is said


def test_I06_an_answer_streams_and_its_figures_are_told(chat: Chat) -> None:
    chat.send("endless please")
    text = chat.page.locator(f"{ANSWER} .markdown >> nth=-1")
    chat.page.wait_for_selector(".answer.running .rate")
    seen = len(text.inner_text())
    until(lambda: len(text.inner_text()) > seen)
    chat.page.click("#stop")
    figures = chat.ended(0).locator(".figure").all_inner_texts()
    assert any("tokens/s" in words for words in figures) and any("first after" in words for words in figures)
    answer = chat.say("hello there")
    figures = answer.locator(".figure").all_inner_texts()
    assert answer.locator(".markdown >> nth=-1").inner_text() == "hello there"
    assert any("prompt tokens, " in words and "cached" in words for words in figures), (
        "the conversation so far was cached"
    )
    assert "12 completion tokens" in figures and "ended by itself" in figures
    assert "tokens used" in chat.page.inner_text("#context")


def test_I06_stop_ends_the_request_on_the_server_and_keeps_what_was_said(chat: Chat, server: RealServer) -> None:
    for stop in ("click", "key"):
        chat.send("endless please")
        chat.page.wait_for_selector(".answer.running .rate")
        chat.page.wait_for_selector(".answer.running:has-text('on a')")
        if stop == "click":
            chat.page.click("#stop")
        else:
            chat.page.keyboard.press("Escape")
        answer = chat.ended(0 if stop == "click" else 1)
        assert "stopped" in answer.locator(".finish").inner_text()
        assert "on a" in answer.inner_text()
        until(lambda: server.get("/health")[2]["open_requests"] == 0)


def test_I06_continue_goes_on_with_an_answer_that_was_cut(chat: Chat) -> None:
    chat.settings()
    chat.page.fill("#set-max_tokens", "8")
    answer = chat.say("endless please")
    assert answer.locator(".finish").inner_text() == "ended at the limit of tokens"
    assert answer.locator(".markdown >> nth=-1").inner_text().startswith("on and o")
    chat.do("continue")
    chat.ended(0)
    sent = chat.bodies[-1]
    assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    assert sent["messages"][-1] == {"role": "assistant", "content": "on and o"}
    assert len(answer.locator(".markdown >> nth=-1").inner_text()) > 8


def test_I06_regenerate_keeps_both_answers(chat: Chat) -> None:
    answer = chat.say("first words")
    chat.do("regenerate")
    chat.page.wait_for_selector(".versions:has-text('2 of 2')")
    chat.ended(0)
    assert [body["messages"] for body in chat.bodies] == [[{"role": "user", "content": "first words"}]] * 2
    chat.do("previous")
    assert answer.locator(".versions").inner_text().split("\n")[1:2] or "1 of 2" in answer.inner_text()
    assert "1 of 2" in answer.locator(".versions").inner_text()
    chat.do("next")
    assert "2 of 2" in answer.locator(".versions").inner_text()


def test_I06_a_message_is_edited_and_the_conversation_goes_on_from_there(chat: Chat) -> None:
    chat.say("one")
    chat.say("two")
    chat.page.locator(".message.user >> nth=0").locator('[data-action="edit"]').click()
    chat.page.fill(".editor textarea", "uno")
    chat.do("save")
    chat.page.wait_for_selector(".message >> nth=2", state="detached")
    chat.ended(0)
    assert chat.texts(".message.user .text") == ["uno"]
    assert chat.bodies[-1]["messages"] == [{"role": "user", "content": "uno"}]
    chat.page.click("#toasts >> text=Undo")
    chat.page.wait_for_selector(".message >> nth=3")
    assert chat.texts(".message.user .text") == ["one", "two"]
    chat.page.press("#text", "ArrowUp")
    assert chat.page.input_value(".editor textarea") == "two", "the last one"
    chat.do("cancel")
    assert chat.page.evaluate("document.activeElement.id") == "text"


def test_I06_an_answer_is_edited_and_the_model_sees_the_new_one(chat: Chat) -> None:
    chat.say("hello")
    chat.page.locator(ANSWER).locator('[data-action="edit"]').click()
    chat.page.fill(".editor textarea", "my *own* words")
    chat.do("save")
    assert chat.page.locator(f"{ANSWER} em").inner_text() == "own"
    chat.say("and now")
    assert chat.bodies[-1]["messages"][1] == {"role": "assistant", "content": "my *own* words"}


def test_I06_markdown_is_shown_and_harmless_and_code_is_copied(chat: Chat) -> None:
    answer = chat.say("markdown please")
    assert answer.locator("h3").inner_text() == "A title" and answer.locator("td").count() == 2
    assert answer.locator("img, script").count() == 0 and chat.page.evaluate("window.pwned") is None
    link = answer.locator("a").first
    assert link.get_attribute("rel") == "noopener noreferrer nofollow" and link.get_attribute("target") == "_blank"
    answer.get_by_role("button", name="Copy this code").click()
    chat.page.wait_for_selector("text=Copied")
    assert clipboard(chat.page) == 'print("<b>hello</b>")'
    answer.locator('[data-action="copy"]').click()
    answer.locator('.buttons >> text="Copied"').wait_for()
    assert clipboard(chat.page).startswith("# A title")


def test_I06_reasoning_is_folded(chat: Chat) -> None:
    answer = chat.say("ponder this")
    thoughts = answer.locator(".reasoning")
    assert thoughts.get_attribute("open") is None
    assert answer.locator(".answer > .markdown").inner_text() == "So it is."
    thoughts.locator("summary").click()
    assert thoughts.locator("strong").inner_text() == "let me"


def test_I06_calls_are_shown_and_their_results_sent(chat: Chat) -> None:
    chat.settings()
    chat.page.fill("#set-tools", json.dumps(TOOLS))
    answer = chat.say("weather in Paris?")
    assert "get_weather" in answer.locator(".call summary").inner_text()
    assert json.loads(answer.locator(".call code >> nth=-1").inner_text()) == {"city": "Paris"}
    assert chat.bodies[-1]["tools"] == TOOLS
    chat.page.fill(".results textarea", '{"sky": "clear"}')
    chat.do("results")
    answer = chat.ended(1)
    assert answer.locator(".markdown >> nth=-1").inner_text() == "It is sunny in Paris."
    call, result = chat.bodies[-1]["messages"][1:]
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": '{"sky": "clear"}'}


def test_I06_tool_choice_is_sent(chat: Chat) -> None:
    chat.settings()
    assert not chat.page.locator("#set-tool_choice").is_visible(), "only where there are tools"
    chat.page.fill("#set-tools", json.dumps(TOOLS))
    chat.page.select_option("#set-tool_choice", "none")
    chat.say("hello")
    assert chat.bodies[-1]["tool_choice"] == "none"


# --- several answers, tokens


def test_I06_answers_side_by_side_and_one_is_picked(chat: Chat) -> None:
    chat.settings()
    chat.page.fill("#set-n", "3")
    answer = chat.say("several please")
    texts = [text.strip() for text in answer.locator(".answer > .markdown:visible").all_inner_texts()]
    assert texts == ["The first answer.", "The second answer.", "The third answer."]
    tops = [box["y"] for box in (answer.locator(".answer").nth(i).bounding_box() for i in range(2)) if box]
    assert tops[0] == tops[1], "side by side"
    answer.get_by_role("button", name="Go on with answer 2").click()
    assert answer.locator(".answer").count() == 1 and "2 of 3" in answer.locator(".versions").inner_text()
    chat.page.fill("#set-n", "")
    chat.say("go on")
    assert chat.bodies[-1]["messages"][1]["content"] == "The second answer."


def test_I06_going_on_without_a_pick_takes_the_first(chat: Chat) -> None:
    chat.settings()
    chat.page.fill("#set-n", "2")
    chat.say("several please")
    chat.say("go on")
    assert chat.bodies[-1]["messages"][1]["content"] == "The first answer."


def test_I06_tokens_are_coloured_and_tell_their_alternatives(chat: Chat) -> None:
    chat.settings()
    chat.page.check("#set-logprobs")
    chat.page.fill("#set-top_logprobs", "3")
    answer = chat.say("unsure")
    assert (chat.bodies[-1]["logprobs"], chat.bodies[-1]["top_logprobs"]) == (True, 3)
    assert any("perplexity 12.2" in words for words in answer.locator(".figure").all_inner_texts())
    chat.do("tokens")
    tokens = answer.locator(".tokens .token")
    assert tokens.all_inner_texts() == [*"maybe", "<|im_end|>"]
    assert "s4" in (tokens.first.get_attribute("class") or ""), "a probability of 8 %"
    tokens.nth(1).hover()
    card = answer.locator(".token-card")
    assert "8.2 %" in card.inner_text() and "log-probability -2.5" in card.inner_text()
    assert card.locator("tr").count() == 3
    answer.locator(".tokens").focus()
    chat.page.keyboard.press("Home")
    assert card.locator("code").first.inner_text() == "m"
    chat.page.keyboard.press("ArrowRight")
    assert card.locator("code").first.inner_text() == "a"
    chat.page.keyboard.press("Escape")
    assert not card.is_visible()
    chat.do("tokens")
    assert answer.locator(".answer > .markdown").is_visible() and not answer.locator(".tokens").is_visible()


def test_I06_letters_of_several_tokens_are_shown_whole(chat: Chat) -> None:
    chat.settings()
    chat.page.check("#set-logprobs")
    answer = chat.say("letters")
    assert answer.locator(".answer > .markdown").inner_text() == "ä€𝄞 end"
    chat.page.keyboard.press("Escape")
    chat.do("tokens")
    assert answer.locator(".tokens").inner_text().replace("◦", "") == "ä€𝄞 end<|im_end|>"


# --- settings


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.3", 0.3),
        ("top_p", "0.9", 0.9),
        ("top_k", "40", 40),
        ("min_p", "0.05", 0.05),
        ("max_tokens", "50", 50),
        ("seed", "7", 7),
        ("presence_penalty", "0.5", 0.5),
        ("frequency_penalty", "-0.5", -0.5),
        ("repetition_penalty", "1.1", 1.1),
        ("stop", "STOP\n\\n", ["STOP", "\n"]),
        ("extra", '{"typical_p": 0.95}', None),
    ],
)
def test_I06_each_setting_is_sent_and_taken(chat: Chat, name: str, text: str, value: object) -> None:
    chat.settings()
    chat.page.fill(f"#set-{name}", text)
    answer = chat.say("hello")
    assert (
        answer.locator(".answer > .markdown").inner_text() == "hello" and answer.locator(".error:visible").count() == 0
    )
    assert chat.bodies[-1].get(name) == value or chat.bodies[-1]["typical_p"] == 0.95
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")
    assert chat.page.input_value(f"#set-{name}") == text, "kept with the conversation"
    chat.page.click("#reset")
    chat.say("again")
    assert name not in chat.bodies[-1] and "typical_p" not in chat.bodies[-1]


def test_I06_a_system_prompt_is_obeyed(chat: Chat) -> None:
    chat.settings()
    chat.page.fill("#set-system", "You are a pirate")
    assert chat.say("hello").locator(".markdown >> nth=-1").inner_text() == "Arr."


def test_I06_response_formats_are_sent(chat: Chat) -> None:
    chat.settings()
    assert not chat.page.locator("#set-schema").is_visible()
    chat.page.select_option("#set-response_format", "json_object")
    assert "Ann" in chat.say("a person").inner_text()
    assert chat.bodies[-1]["response_format"] == {"type": "json_object"}
    chat.page.select_option("#set-response_format", "json_schema")
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    chat.page.fill("#set-schema", json.dumps(schema))
    assert "Ann" in chat.say("a person").inner_text()
    assert chat.bodies[-1]["response_format"]["json_schema"]["schema"] == schema


def test_I06_reasoning_effort_is_sent(chat: Chat) -> None:
    chat.settings()
    chat.page.select_option("#set-reasoning_effort", "high")
    chat.say("ponder")
    assert chat.bodies[-1]["reasoning_effort"] == "high"


def test_I06_a_wrong_setting_is_marked_at_its_field(chat: Chat) -> None:
    chat.watch.allowed.append("400")
    chat.settings()
    chat.page.fill("#set-temperature", "999")
    answer = chat.say("hello")
    assert answer.locator(".error").inner_text().startswith("temperature is 999")
    assert answer.locator(".finish").inner_text() == "refused"
    assert chat.page.get_attribute("#set-temperature", "aria-invalid") == "true"
    chat.page.fill("#set-temperature", "1")
    assert chat.page.get_attribute("#set-temperature", "aria-invalid") is None
    chat.page.select_option("#set-response_format", "json_schema")
    chat.page.fill("#set-schema", "{oops")
    chat.page.fill("#text", "hello")
    number = len(chat.bodies)
    chat.page.press("#text", "Enter")
    chat.page.wait_for_selector("#set-schema[aria-invalid]")
    assert len(chat.bodies) == number and chat.page.input_value("#text") == "hello", "nothing was sent, nothing lost"


# --- the server


def test_I06_the_models_are_listed_and_one_is_asked_for(chat: Chat) -> None:
    assert chat.texts("#model option") == ["script"]
    chat.say("hello")
    assert chat.bodies[-1]["model"] == "script"


def test_I06_of_several_models_the_chosen_one_answers(browser: Browser, tmp_path: Path) -> None:
    models = (write_script(tmp_path, "red"), write_script(tmp_path, "blue"))
    with SeveralModels(tmp_path, models) as server, watched(browser, server.url) as (page, watch):
        chat = Chat(page, watch)
        assert chat.texts("#model option") == ["red", "blue"]
        assert "I am red." in chat.say("hello").inner_text()
        page.select_option("#model", "blue")
        assert "I am blue." in chat.say("hello").inner_text(), "it is loaded for this request"
        assert [body["model"] for body in chat.bodies] == ["red", "blue"]


@pytest.mark.parametrize("status", [429, 503])
def test_I06_a_busy_server_is_asked_again_when_it_said(chat: Chat, status: int) -> None:
    chat.watch.allowed.append(str(status))
    refusals = 2

    def refuse(route: Any) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals < 0:
            route.continue_()
            return
        error = {"error": {"message": "there is no room", "code": "queue_full"}}
        route.fulfill(status=status, headers={"retry-after": "1" if refusals == 1 else "60"}, json=error)

    chat.page.route("**/v1/chat/completions", refuse)
    chat.send("hello")
    chat.page.wait_for_selector(".state:has-text('there is no room Trying again in 60 s (2 of 8)')")
    chat.do("try-now")
    assert chat.ended(0).locator(".answer > .markdown").inner_text() == "hello"
    assert len(chat.bodies) == 3


def test_I06_a_wait_for_a_busy_server_is_stopped(chat: Chat) -> None:
    chat.watch.allowed.append("503")
    chat.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=503, headers={"retry-after": "60"}, body="")
    )
    chat.send("hello")
    chat.page.wait_for_selector(".state:has-text('status 503')")
    chat.page.keyboard.press("Escape")
    assert "stopped" in chat.ended(0).inner_text()


def test_I06_a_server_that_is_gone_or_breaks_is_told_in_words(chat: Chat) -> None:
    chat.watch.allowed += ["ERR_FAILED", "500"]
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    answer = chat.say("hello")
    assert "cannot be reached" in answer.locator(".error").inner_text()
    assert answer.locator(".finish").inner_text() == "not sent"
    chat.page.unroute("**/v1/chat/completions")
    cut = 'data: {"id":"x","choices":[{"index":0,"delta":{"content":"half"},"finish_reason":null}]}\n\n'
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
    answer = chat.say("again")
    assert "was cut" in answer.locator(".error").inner_text() and "half" in answer.inner_text()
    assert answer.locator(".finish").inner_text() == "cut off"
    chat.page.unroute("**/v1/chat/completions")
    answer = chat.say("break down")
    assert "half a" in answer.inner_text() and answer.locator(".error").inner_text() != ""
    assert chat.bodies[-1]["messages"][-2]["content"] == "half", "what was said is part of the conversation"


def occupy(server: RealServer, name: str) -> threading.Thread:
    """Ask for an endless answer, until it is cancelled under this name."""
    body = {"messages": [{"role": "user", "content": "endless"}], "max_tokens": 20_000}
    head = {"content-type": "application/json", "x-request-id": name}
    asked = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), head)
    num_open = server.get("/health")[2]["open_requests"]

    def ask() -> None:
        with pytest.raises(OSError), urllib.request.urlopen(asked, timeout=120):
            pass

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: server.get("/health")[2]["open_requests"] > num_open)
    return thread


def test_I06_why_it_waits_is_told_and_a_full_queue_is_waited_for(browser: Browser, tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-queue-size", "1")
    with (
        RealServer(script(tmp_path), tmp_path / "log", *flags) as server,
        watched(browser, server.url) as (page, watch),
    ):
        watch.allowed.append("429")
        chat = Chat(page, watch)
        first = occupy(server, "first")
        chat.send("hello")
        chat.do("why")
        until(lambda: "sequence" in page.inner_text(".why"))  # a request that was not looked at yet has no reason
        assert "Waits at position 1" in page.inner_text(".why")
        chat.do("why")
        page.wait_for_selector(".why", state="hidden")
        chat.do("why")
        server.post("/v1/requests/first/cancel", {})
        first.join(60)
        assert chat.ended(0).locator(".answer > .markdown").inner_text() == "hello"
        assert page.locator(".state button").count() == 0

        others = [occupy(server, "second"), occupy(server, "third")]  # one runs, one waits: no more fit
        chat.send("again")
        page.wait_for_selector(".state:has-text('Trying again in')")
        for name in ("second", "third"):
            server.post(f"/v1/requests/{name}/cancel", {})
        for other in others:
            other.join(60)
        chat.do("try-now")
        assert chat.ended(1).locator(".answer > .markdown").inner_text() == "again"


def test_I06_an_engine_that_dies_in_the_middle_of_an_answer_is_not_noticed(chat: Chat, server: RealServer) -> None:
    chat.watch.allowed.append("503")  # of /readyz, where it takes long enough to ask
    before = server.pid("engine")
    answer = chat.say("crash")
    assert answer.locator(".answer > .markdown").inner_text() == "on and on it goes"
    assert answer.locator(".finish").inner_text() == "ended by itself"
    assert server.pid("engine") != before


def engines_of(pid: int) -> set[int]:
    """Children of a process that run an engine's program; not one that is about to, for which its parent waits."""
    children, found = [], set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread ended
            children += (task / "children").read_text().split()
    for child in children:
        with suppress(OSError):  # it ended
            if b"octavo.assembly" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def test_a_stream_that_stalls_while_the_engine_is_replaced_says_so(chat: Chat, server: RealServer) -> None:
    chat.watch.allowed.append("503")  # the answer of /readyz, which says why
    chat.send("endless please")
    chat.page.wait_for_selector(".answer.running .rate")
    api, engine = server.pid("api"), server.pid("engine")
    assert engines_of(api) == {engine}
    os.kill(engine, signal.SIGKILL)
    until(lambda: bool(engines_of(api) - {engine}))
    (successor,) = engines_of(api) - {engine}
    os.kill(successor, signal.SIGSTOP)  # it takes its time
    try:
        state = chat.page.locator(f"{ANSWER} .state")
        until(lambda: "The engine is being restarted" in state.inner_text())
        said = chat.page.inner_text(f"{ANSWER} .markdown >> nth=-1")
        assert said.startswith("on"), "what was said stays"
        cursor = "getComputedStyle(document.querySelector('.running .markdown > :last-child'), '::after').content"
        assert chat.page.evaluate(cursor) == "none", "no cursor blinks as if something came"
        chat.page.click("#new")
        chat.send("hello")  # its first token has to wait, too
        chat.page.wait_for_selector(".state:has-text('The engine is being restarted')")
    finally:
        os.kill(successor, signal.SIGCONT)
    assert chat.ended(0).locator(".answer > .markdown").inner_text() == "hello"
    chat.page.click("#conversations >> text=endless please")
    until(lambda: state.inner_text() == "")
    until(lambda: len(chat.page.inner_text(f"{ANSWER} .markdown >> nth=-1")) > len(said))
    chat.page.keyboard.press("Escape")
    assert chat.ended(0).locator(".finish").inner_text() == "stopped"


# --- conversations


def test_I06_conversations_are_kept_renamed_found_and_deleted(chat: Chat) -> None:
    page = chat.page
    chat.say("about apples")
    page.click("#new")
    assert page.locator("#empty").is_visible()
    chat.say("about pears")
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert chat.texts("#conversations .title") == ["about pears", "about apples"]
    assert chat.texts(".message.user .text") == ["about pears"]
    page.click("#conversations >> text=about apples")
    assert chat.texts(".message.user .text") == ["about apples"]
    chat.do("rename", "#conversations")
    page.fill(".rename input", "Fruit")
    page.keyboard.press("Enter")
    assert "Fruit" in chat.texts("#conversations .title") and page.title() == "Fruit · Octavo"
    page.fill("#filter", "pears")
    assert chat.texts("#conversations .title") == ["about pears"]
    page.fill("#filter", "nothing such")
    assert chat.texts("#conversations li") == ["None"]
    page.fill("#filter", "")
    chat.do("delete", "#conversations")
    assert chat.texts("#conversations .title") == ["about pears"]
    page.click("#toasts >> text=Undo")
    assert sorted(chat.texts("#conversations .title")) == ["Fruit", "about pears"]
    page.click("#delete-all")
    assert chat.texts("#conversations .title") == ["New conversation"] and page.locator("#empty").is_visible()
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('octavo.chat.c.'))") == []
    page.locator("#toasts >> text=Undo").last.click()
    assert sorted(chat.texts("#conversations .title")) == ["Fruit", "about pears"]


def test_I06_conversations_are_exported_and_imported(chat: Chat, tmp_path: Path) -> None:
    page = chat.page
    chat.say("keep me")
    page.click("#new")
    chat.say("me too")
    for selector, count in (('#conversations [data-action="export"]', 1), ("#export-all", 2)):
        with page.expect_download() as found:
            page.click(selector)
        path = tmp_path / found.value.suggested_filename
        found.value.save_as(path)
        assert len(json.loads(path.read_text())["conversations"]) == count
    page.evaluate("localStorage.clear()")
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert chat.texts(".message") == []
    with page.expect_file_chooser() as chooser:
        page.click("#import")
    chooser.value.set_files(path)
    page.wait_for_selector("#toasts >> text=2 conversations were imported")
    assert sorted(chat.texts("#conversations .title")) == ["keep me", "me too"]
    chat.say("and on")
    assert [message["content"] for message in chat.bodies[-1]["messages"]][2] == "and on"
    (tmp_path / "wrong.json").write_text("[]")
    page.set_input_files("#file", tmp_path / "wrong.json")
    page.wait_for_selector("#toasts >> text=holds no conversations")


def test_I06_an_answer_goes_on_while_another_conversation_is_read(chat: Chat) -> None:
    chat.send("endless please")
    chat.page.wait_for_selector(".answer.running .rate")
    chat.page.click("#new")
    assert chat.page.locator("#conversations .busy").count() == 1
    chat.say("meanwhile")
    chat.page.click("#conversations >> text=endless please")
    chat.page.click("#stop")
    chat.page.wait_for_selector(".finish:has-text('stopped')")
    assert chat.page.locator("#conversations .busy").count() == 0


def test_I06_what_came_before_the_page_was_left_is_kept_and_gone_on_with(chat: Chat) -> None:
    chat.send("endless please")
    chat.page.wait_for_selector(".answer.running .rate")
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")
    answer = chat.page.locator(ANSWER)
    assert answer.locator(".answer > .markdown").inner_text().startswith("on") and "cut off" in answer.inner_text()
    chat.do("continue")
    chat.page.wait_for_selector(".answer.running .rate")
    chat.page.keyboard.press("Escape")
    assert "stopped" in chat.ended(0).inner_text()


def test_I06_where_the_time_of_an_answer_went(chat: Chat) -> None:
    answer = chat.say("hello")
    chat.do("time")
    story = answer.locator(".story")
    story.locator("table").wait_for()
    assert "Ended (stop)" in story.inner_text() and "admitted: tokens" in story.inner_text()
    phases = " ".join(story.locator(".phases li").all_inner_texts())
    assert "queue" in phases and "prefill" in phases and "decode" in phases
    chat.do("time")
    assert not story.is_visible()
    chat.page.route("**/explain", lambda route: route.fulfill(status=404, json={"error": {"message": "gone"}}))
    chat.watch.allowed.append("404")
    chat.do("time")
    story.locator("text=knows it no longer").wait_for()


def test_I06_a_draft_and_another_tab(chat: Chat) -> None:
    chat.say("here")
    chat.page.fill("#text", "half a thou")
    other = chat.page.context.new_page()
    other.goto("/")
    other.wait_for_selector(".message.user")
    assert other.input_value("#text") == "half a thou"
    chat.say("more")
    other.wait_for_selector(".message.user:has-text('more')")
    other.close()


# --- code


def test_I06_the_request_as_curl_and_python(chat: Chat, server: RealServer) -> None:
    chat.settings()
    chat.page.fill("#set-temperature", "0.5")
    chat.page.fill("#text", "it's 'quoted'")
    chat.page.click("#show-code")
    shown = chat.page.inner_text("#code")
    assert shown.startswith("curl") and server.url in shown and "Authorization" not in shown
    assert not chat.page.locator("#code-key").is_visible(), "this server asks for none"
    chat.do("copy-code", "#code-dialog")
    chat.page.wait_for_selector("#code-dialog >> text=Copied")
    assert clipboard(chat.page).strip() == shown.strip()
    chat.page.click("#as-python")
    assert "from openai import OpenAI" in chat.page.inner_text("#code")
    program = chat.page.inner_text("#code")
    assert "temperature=0.5" in program
    for command in ([sys.executable, "-c", program], *([["sh", "-c", shown]] if shutil.which("curl") else [])):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        text = "".join(re.findall(r'"content":"([^"]*)"', done.stdout)) or done.stdout  # events may part a word
        assert "quoted" in text, done.stderr
    chat.page.click("#code-dialog >> text=Close")
    assert not chat.page.locator("#code-dialog").is_visible()


# --- keys, looks


def test_I06_keys(chat: Chat) -> None:
    page = chat.page
    page.focus("#text")
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    chat.ended(0)
    assert chat.bodies[-1]["messages"][0]["content"] == "line one\nline two"
    for place in ("#text", "#scroller"):
        page.locator(place).focus()
        page.keyboard.press("Alt+Shift+h")
        assert page.locator("#help-dialog").is_visible()
        page.keyboard.press("Alt+Shift+n")
        assert page.locator(".message").count() == 2, "an open dialog has the keys"
        page.keyboard.press("Escape")
        assert not page.locator("#help-dialog").is_visible()
        page.locator(place).focus()
        page.keyboard.press("Alt+Shift+s")
        assert page.evaluate("document.activeElement.name") == "system"
        page.locator(place).focus()
        page.keyboard.press("Alt+Shift+s")
        assert not page.locator("#settings-panel").is_visible()
        page.keyboard.press("Alt+Shift+c")
        assert page.locator("#code-dialog").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("#code-dialog").is_visible() and page.input_value("#text") == ""
    page.keyboard.press("Alt+Shift+r")
    page.wait_for_selector(".versions:has-text('2 of 2')")
    chat.ended(0)
    page.keyboard.press("Alt+Shift+n")
    assert page.locator("#empty").is_visible() and page.evaluate("document.activeElement.id") == "text"


def test_what_is_typed_into_a_fresh_page_is_a_message(chat: Chat) -> None:
    page, sentence = chat.page, "Summarise this text in one sentence."
    assert page.evaluate("document.activeElement.id") == "text", "at once, before anything is clicked"
    page.keyboard.type(sentence)
    assert page.input_value("#text") == sentence
    assert not page.locator("#settings-panel").is_visible() and page.input_value("#set-system") == ""
    page.keyboard.press("Enter")
    chat.ended(0)
    assert [body["messages"] for body in chat.bodies] == [[{"role": "user", "content": sentence}]]


@pytest.mark.parametrize("place", ["#scroller", "#new", "#toggle-settings", ".message.assistant"])
def test_letters_typed_anywhere_go_to_the_message_field(chat: Chat, place: str) -> None:
    page = chat.page
    chat.say("hello")
    page.locator(place).focus()
    page.keyboard.type("new rules? (c) / stop")
    assert page.input_value("#text") == "new rules? (c) / stop"
    assert page.locator(".message").count() == 2 and page.locator("dialog[open]").count() == 0
    page.locator("#filter").focus()
    page.keyboard.type("hel")
    assert page.input_value("#filter") == "hel", "another field keeps what is typed into it"
    assert page.input_value("#text") == "new rules? (c) / stop"


def test_escape_closes_the_settings_beside_the_page_and_the_dialogs(chat: Chat) -> None:
    page = chat.page
    for field in ("#set-system", "#text"):
        chat.settings()
        page.focus(field)
        page.keyboard.press("Escape")
        assert not page.locator("#settings-panel").is_visible(), field
        page.keyboard.type("x")
    assert page.input_value("#text") == "xx" and page.input_value("#set-system") == ""
    for opener, dialog in (("#show-help", "#help-dialog"), ("#show-code", "#code-dialog")):
        page.click(opener)
        assert page.locator(dialog).is_visible()
        page.keyboard.press("Escape")
        assert not page.locator(dialog).is_visible()
    chat.settings()
    page.fill("#text", "endless please")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer.running .rate")
    page.keyboard.press("Escape")
    assert "stopped" in chat.ended(0).inner_text() and page.locator("#settings-panel").is_visible(), "the answer first"


def test_I06_the_focus_stays_where_a_key_was_pressed(chat: Chat) -> None:
    def press(selector: str) -> None:
        chat.page.locator(selector).focus()
        chat.page.keyboard.press("Enter")

    def focused() -> str:
        where: str = chat.page.evaluate("document.activeElement.dataset.action ?? document.activeElement.tagName")
        return where

    chat.say("one")
    press(f'{ANSWER} [data-action="regenerate"]')
    chat.page.wait_for_selector(".versions:has-text('2 of 2')")
    chat.ended(0)
    assert focused() in ("regenerate", "copy")
    press('[data-action="previous"]')
    assert focused() == "next", "there is nothing before the first"
    chat.page.click("#new")
    chat.settings()
    chat.page.fill("#set-n", "2")
    chat.say("several please")
    press('[data-action="use"] >> nth=1')
    assert focused() == "ARTICLE" and chat.page.locator(".answers.several").count() == 0
    press('#conversations [data-action="delete"]')
    assert chat.page.evaluate("document.activeElement.ariaCurrent") == "true"


def test_I06_everything_is_reached_by_tab_and_has_a_name(chat: Chat) -> None:
    chat.say("markdown please")
    chat.settings()
    page = chat.page
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, a, input, select, textarea')]
          .filter((one) => one.checkVisibility() && !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
          .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    seen: list[str] = page.evaluate(
        """[...document.querySelectorAll('button:not(:disabled), a, input, select, textarea, summary')]
          .filter((one) => one.checkVisibility()).map((one) => { one.dataset.seen = 'no'; return one.outerHTML; })"""
    )
    page.evaluate("document.activeElement.blur()")
    for _ in range(len(seen) + 20):
        page.keyboard.press("Tab")
        page.evaluate("if (document.activeElement.dataset.seen) document.activeElement.dataset.seen = 'yes'")
    assert page.evaluate("[...document.querySelectorAll('[data-seen=no]')].map((one) => one.outerHTML)") == []


def test_I06_dark_colours_are_chosen_kept_and_readable(browser: Browser, server: RealServer) -> None:
    for scheme, other in (("light", "dark"), ("dark", "light")):
        with watched(browser, server.url, color_scheme=scheme) as (page, watch):
            chat = Chat(page, watch)
            chat.settings()
            chat.say("markdown please")
            for name in (scheme, other):
                background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
                assert (sum(map(int, background[4:-1].split(","))) < 300) == (name == "dark"), (name, background)
                assert poor_contrast(page) == []
                if name == scheme:
                    page.click("#theme")
            page.reload()
            page.wait_for_selector("#model option", state="attached")
            assert page.evaluate("document.documentElement.dataset.theme") == other


def poor_contrast(page: Page) -> list[str]:
    """Texts with less contrast than WCAG 2 asks for (AA: 4.5 to 1)."""
    found: list[str] = page.evaluate(
        """() => {
          const parts = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
          const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
          const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
          const ground = (one) => {
            for (let at = one; at; at = at.parentElement) {
              const color = parts(getComputedStyle(at).backgroundColor);
              if (color.length === 3 || color[3] === 1) return color;
            }
            return [255, 255, 255];
          };
          const poor = [];
          for (const one of document.body.querySelectorAll("*")) {
            const isText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
            if (!isText || !one.checkVisibility() || one.disabled) continue;
            const [a, b] = [light(parts(getComputedStyle(one).color)), light(ground(one))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${one.outerHTML.slice(0, 90)}`);
          }
          return poor;
        }"""
    )
    return found


def test_I06_a_screen_of_320_pixels(browser: Browser, server: RealServer) -> None:
    with watched(browser, server.url, viewport={"width": 320, "height": 560}, has_touch=True) as (page, watch):
        chat = Chat(page, watch)
        assert not page.locator("#list-panel").is_visible() and not page.locator("#settings-panel").is_visible()
        chat.settings()
        page.fill("#set-n", "2")
        page.check("#set-logprobs")
        page.keyboard.press("Escape")
        assert not page.locator("#settings-panel").is_visible(), "a drawer closes"
        answer = chat.say("markdown please")
        widths = page.evaluate(
            "[document.documentElement.scrollWidth, document.getElementById('scroller').scrollWidth]"
        )
        assert max(widths) <= 320, widths
        answer.locator('[data-action="tokens"]').first.click()
        answer.locator(".tokens .token").nth(3).click()
        box = answer.locator(".token-card:visible").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 320
        page.click("#toggle-list")
        assert page.locator("#list-panel").is_visible()
        page.click("#new")
        assert not page.locator("#list-panel").is_visible() and page.locator("#empty").is_visible()


def small_targets(page: Page) -> list[str]:
    """Shown buttons and links of the page, not of a model's text, that are smaller than 44 pixels either way."""
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll("button, a, select, summary")]
          .filter((one) => one.checkVisibility() && !one.closest(".markdown p, .markdown li"))
          .map((one) => [one, one.getBoundingClientRect()])
          .filter(([, box]) => box.width < 43.99 || box.height < 43.99)
          .map(([one, box]) => `${box.width} x ${box.height} ${one.outerHTML.slice(0, 90)}`)"""
    )
    return found


@pytest.mark.parametrize("is_phone", [True, False])
def test_a_phone_shows_send_beside_a_long_name_and_targets_for_fingers(
    browser: Browser, tmp_path: Path, is_phone: bool
) -> None:
    name = "a-model-whose-name-has-fifty-characters-no-less-xx"
    size = {"width": 390 if is_phone else 1280, "height": 844}
    with (
        RealServer(script(tmp_path), tmp_path / "log", "--served-model-name", name) as server,
        watched(browser, server.url, viewport=size, has_touch=True, is_mobile=True) as (page, watch),
    ):
        chat = Chat(page, watch)
        assert len(name) == 50 and chat.texts("#model option") == [name]
        page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        for control in ("#send", "#toggle-settings", "#show-help"):
            box = page.locator(control).bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= size["width"], control
        chat.settings()
        page.check("#set-logprobs")
        page.fill("#set-n", "2")
        assert small_targets(page) == []
        page.keyboard.press("Escape")
        chat.say("markdown please")
        assert small_targets(page) == []
        if is_phone:
            page.click("#toggle-list")
        page.click('#conversations [data-action="rename"]')
        assert small_targets(page) == []
        for dialog in ("help-dialog", "code-dialog"):
            page.evaluate(f"document.getElementById('{dialog}').showModal()")
            assert small_targets(page) == []
            page.keyboard.press("Escape")


def test_I06_the_page_stays_where_its_reader_scrolled(chat: Chat) -> None:
    chat.say("markdown please")
    chat.send("endless please")
    chat.page.wait_for_selector(".answer.running .rate")
    chat.page.evaluate("document.getElementById('scroller').scrollTop = 0")
    chat.page.wait_for_selector("#to-end:visible")
    text = chat.page.locator(f"{ANSWER} .markdown >> nth=-1")
    until(lambda: len(text.inner_text()) > 400)
    assert chat.page.evaluate("document.getElementById('scroller').scrollTop") == 0
    chat.page.click("#to-end")
    chat.page.wait_for_selector("#to-end", state="hidden")
    chat.page.keyboard.press("Escape")
    chat.ended(1)


# --- who gets it


def test_I06_a_key_is_shown_once_and_the_page_works(browser: Browser, tmp_path: Path) -> None:
    with (
        RealServer(script(tmp_path), tmp_path / "log", "--api-key", "secret") as server,
        watched(browser, server.url) as (page, watch),
    ):
        watch.allowed.append("401")
        page.goto("/")
        page.fill("input[name=key]", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=no valid key")
        page.fill("input[name=key]", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        page.fill("#text", "hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{ANSWER} .finish")
        page.click("#show-code")
        assert "Bearer $OCTAVO_API_KEY" in page.inner_text("#code") and "secret" not in page.content()
        assert "export OCTAVO_API_KEY=" in page.inner_text("#code-key"), "how the variable gets its value"
        command = page.inner_text("#code-key code").replace("your key", "secret") + "\n" + page.inner_text("#code")
        if shutil.which("curl"):
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
            assert '"content":"h' in done.stdout, done.stdout + done.stderr
        page.click("#as-python")
        assert 'os.environ["OCTAVO_API_KEY"]' in page.inner_text("#code") and page.is_visible("#code-key")
        page.keyboard.press("Escape")
        page.context.clear_cookies()  # the session is over
        page.fill("#text", "more")
        page.keyboard.press("Enter")
        page.wait_for_selector("input[name=key]")
        page.fill("input[name=key]", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#sign-out:visible")
        assert page.input_value("#text") == "more" and page.locator(".message").count() == 2, "nothing is lost"
        page.click("#sign-out button")
        page.wait_for_selector("input[name=key]")


def test_I06_programs_get_a_word_and_browsers_a_page_that_makes_no_html_of_text(server: RealServer) -> None:
    def get(accept: str) -> tuple[str, Any]:
        request = urllib.request.Request(server.url + "/", headers={"accept": accept} if accept else {})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode(), answer.headers

    for accept in ("", "*/*", "application/json"):
        assert get(accept)[0] == "Octavo is running"
    page, headers = get("text/html,application/xhtml+xml,*/*;q=0.8")
    policy = headers["content-security-policy"]
    assert page.startswith("<!doctype html>") and "default-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy


def test_I06_the_page_works_below_a_path(browser: Browser, tmp_path: Path) -> None:
    with (
        RealServer(script(tmp_path), tmp_path / "log", "--root-path", "/llm") as server,
        watched(browser, server.url) as (page, _),
    ):
        page.goto("/llm/")
        page.wait_for_selector("#model option", state="attached")
        page.fill("#text", "hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{ANSWER} .finish")
        page.click("#show-code")
        assert f"{server.url}/llm/v1/chat/completions" in page.inner_text("#code")
