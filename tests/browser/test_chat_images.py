"""Images on the chat page: chosen, pasted and dropped, shown, sent, kept and removed, in a real browser."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.browsing import watched
from tests.browser.test_chat_page import Chat
from tests.fake_server import RealServer
from tests.media.items import file_of, make_image

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
# Files reach the page as a paste or a drop.
GIVE = """
([kind, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "given.png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
    : new DragEvent("drop", { ...options, dataTransfer: transfer });
  document.getElementById("text").dispatchEvent(event);
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("images")
    path = folder / "script.json"
    rules = [{"contains": "[image]", "say": "I see an image."}, {"contains": "", "say": "I see none."}]
    path.write_text(json.dumps({"images": True, "rules": rules}))
    with RealServer(f"scripted:{path}", folder / "log") as running:
        yield running


@pytest.fixture
def chat(browser: Browser, server: RealServer) -> Iterator[Chat]:
    with watched(browser, server.url) as (page, watch):
        yield Chat(page, watch)
        assert not watch.problems


def give(chat: Chat, kind: str, data: bytes) -> None:
    chat.page.evaluate(GIVE, [kind, base64.b64encode(data).decode()])


def test_images_are_chosen_pasted_dropped_removed_and_sent(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(file_of(make_image(600, 2000)))
    chat.page.set_input_files("#image-file", path)
    chat.page.wait_for_selector("#attached img")
    give(chat, "paste", file_of(make_image(40, 60)))
    chat.page.wait_for_selector("#attached .attachment:nth-child(2)")
    give(chat, "drop", file_of(make_image(30, 30)))
    chat.page.wait_for_selector("#attached .attachment:nth-child(3)")
    chat.page.click("#attached .attachment:nth-child(3) button")
    answer = chat.say("what is it?")
    assert "I see an image." in answer.inner_text()
    first, second, text = chat.bodies[0]["messages"][-1]["content"]
    assert [first["type"], second["type"]] == ["image_url"] * 2 and text == {"type": "text", "text": "what is it?"}
    assert chat.page.locator("#messages .message.user img").count() == 2
    size = chat.page.evaluate(
        "[...document.querySelectorAll('#messages img')].map((i) => [i.naturalWidth, i.naturalHeight])"
    )
    assert size == [[1024, 307], [60, 40]]
    assert chat.page.locator("#attached img").count() == 0
    chat.page.reload()
    chat.page.wait_for_selector("#messages .message.user img")
    assert chat.page.locator("#messages .message.user img").count() == 2


def test_an_image_needs_no_text_and_a_file_that_is_none_is_refused(chat: Chat) -> None:
    give(chat, "paste", b"this is no image")
    chat.page.wait_for_selector("#toasts :text('cannot be read as an image')")
    give(chat, "paste", file_of(make_image(20, 20)))
    chat.page.wait_for_selector("#attached img")
    chat.page.click("#send")
    assert "I see an image." in chat.ended(0).inner_text()


def test_a_model_without_images_has_no_button_for_them(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"rules": [{"contains": "", "say": "Hello."}]}))
    with RealServer(f"scripted:{path}", tmp_path / "log") as server, watched(browser, server.url) as (page, watch):
        chat = Chat(page, watch)
        page.wait_for_selector("#attach", state="hidden")
        give(chat, "paste", file_of(make_image(40, 60)))
        page.wait_for_selector("text=This model takes no images.")
        assert page.locator("#attached img").count() == 0 and "Hello." in chat.say("hi").inner_text()
        assert not watch.problems


def test_the_button_is_there_for_a_model_with_images(chat: Chat) -> None:
    chat.page.wait_for_function("document.querySelectorAll('#model option').length > 0")
    assert chat.page.is_visible("#attach")
