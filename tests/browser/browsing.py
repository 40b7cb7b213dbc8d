"""A real browser for tests: the system's Chromium under Playwright, which downloads nothing here.

`watched` opens a page that notes whatever a user would call broken: errors in the console, scripts that fail, what the
page's own security policy forbade, requests to anywhere but the server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES_HERE = "--host-resolver-rules=MAP *.test 127.0.0.1"  # as an attacker's name server would say
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}`));
"""


def chromium() -> str | None:
    """The browser's path: CHROMIUM in the environment, else one of the usual names."""
    named = os.environ.get("CHROMIUM")
    return named if named and Path(named).exists() else next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start the browser; skip the tests where it, or Playwright, is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install 'octavo[browser]'")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: install it, or name it in CHROMIUM")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", NAMES_HERE]
        )
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """What went wrong on a page. `allowed` are words of console messages that a test brings about on purpose."""

    def __init__(self, page: Page, origin: str) -> None:
        self._page = page
        self.allowed: list[str] = []
        self._said: list[str] = []
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda request: self._note(not self._is_own(request.url, origin), f"asks {request.url}"))

    def _note(self, is_problem: bool, text: str) -> None:
        if is_problem:
            self._said.append(text)

    @staticmethod
    def _is_own(url: str, origin: str) -> bool:
        return url.startswith((origin, "data:", "blob:", "about:"))

    @property
    def problems(self) -> list[str]:
        """Everything that nobody asked for."""
        violations = self._page.evaluate("window.violations ?? []")
        return [text for text in [*self._said, *violations] if not any(word in text for word in self.allowed)]


@contextmanager
def watched(browser: Browser, origin: str, **context: Any) -> Iterator[tuple[Page, Watch]]:
    """Open a page in a context of its own, nothing kept of others; its problems fail the test."""
    options = {"viewport": {"width": 1280, "height": 800}, "base_url": origin, **context}
    with browser.new_context(**options) as opened:
        opened.set_default_timeout(20_000)
        opened.add_init_script(_VIOLATIONS)
        page = opened.new_page()
        watch = Watch(page, origin)
        yield page, watch
        assert watch.problems == []
