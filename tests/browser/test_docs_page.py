"""The page of the API's description and the form that asks for a key, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.browsing import watched
from tests.browser.scripts import script
from tests.browser.test_chat_page import poor_contrast
from tests.fake_server import RealServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("docs")
    with RealServer(script(folder), folder / "log", "--api-key", "secret") as running:
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_description_fits_a_phone_is_readable_and_has_contents(
    browser: Browser, server: RealServer, scheme: str
) -> None:
    with watched(browser, server.url, color_scheme=scheme, **PHONE) as (page, watch):
        watch.allowed += ["401", "favicon"]
        page.goto("/docs")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "the form"
        assert poor_contrast(page) == []
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("nav a")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert poor_contrast(page) == []
        links = page.locator("nav a")
        assert links.count() == page.locator("h2").count() > 20
        links.filter(has_text="POST /v1/messages").first.click()
        assert page.evaluate("document.querySelector(':target').innerText") == "POST /v1/messages"
        assert 0 <= page.evaluate("document.querySelector(':target').getBoundingClientRect().y") < 200
