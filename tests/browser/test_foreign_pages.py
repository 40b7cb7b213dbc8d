"""What a real browser sends for other sites' pages, and by other names, to servers with keys and without."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from octavo.config import Config, WebConfig
from tests.server.fakes import keyed
from tests.server.test_run import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
KEY = "sk-right-and-long"
CHAT = '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
ASK = """async ([base, body]) => {
  const json = { "content-type": "application/json" };
  const chat = "/v1/chat/completions";
  const asked = [
    ["GET", "/v1/models", {}],
    ["GET", "/v1/models", { mode: "no-cors" }],
    ["GET", "/openapi.json", { mode: "no-cors" }],
    ["POST", chat, { mode: "no-cors", body }],
    ["POST", chat, { body, headers: json }],
    ["POST", chat, { mode: "no-cors", body: new Blob([body]) }],
  ];
  const found = [];
  for (const [method, path, init] of asked) {
    try {
      const answer = await fetch(base + path, { method, ...init });
      found.push(answer.type === "opaque" ? "opaque" : answer.status);
    } catch (error) {
      found.push("failed");
    }
  }
  return found;
}"""
FORM = """([action, body]) => {
  const form = Object.assign(document.createElement("form"), { method: "post", enctype: "text/plain", action });
  const field = Object.assign(document.createElement("input"), { name: body.slice(0, -1) + ', "x": "', value: '"}' });
  form.append(field);
  document.body.append(form);
  form.submit();
}"""


class _Evil(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<h1>a page elsewhere</h1>")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """Another site, on another port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Evil) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://evil.test:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def port_of(server: Running) -> str:
    return server.url.rpartition(":")[2]


def test_a_page_elsewhere_gets_nothing_of_a_server_without_keys(page: Page, elsewhere: str) -> None:
    with running(Config()) as server:
        statuses: list[int] = []
        page.goto(elsewhere)
        page.on("response", lambda answer: statuses.append(answer.status))
        for name in ("127.0.0.1", "localhost", "evil.test", str(ipaddress.ip_address(0))):
            found = page.evaluate(ASK, [f"http://{name}:{port_of(server)}", CHAT])
            assert set(found) == {"opaque", "failed"}, "nothing can be read"
        assert set(statuses) == {403} and len(statuses) >= 16
        page.evaluate(FORM, [server.url + "/v1/chat/completions", CHAT])
        page.wait_for_selector("text=--allowed-origins")
        page.goto(elsewhere)
        page.evaluate("(url) => { location.href = url; }", server.url.replace("127.0.0.1", "localhost") + "/")
        page.wait_for_selector("text=type this server's address")
        assert not server.engine.requests


def test_a_name_that_points_here_gets_nothing_of_a_server_without_keys(page: Page) -> None:
    """DNS rebinding: the page and the server are one origin to the browser."""
    with running(Config()) as server:
        answer = page.goto(f"http://evil.test:{port_of(server)}/")
        assert answer is not None and answer.status == 403
        assert set(page.evaluate(ASK, ["", CHAT])) == {403}
        assert not server.engine.requests


def test_an_address_that_is_typed_and_the_pages_own_requests_work(page: Page) -> None:
    with running(Config()) as server:
        for name in ("127.0.0.1", "localhost"):
            answer = page.goto(f"http://{name}:{port_of(server)}/")
            assert answer is not None and answer.status == 200
            assert page.evaluate(ASK, ["", CHAT]) == [200, 200, 200, 415, 200, 415], "JSON is declared as such"
        assert len(server.engine.requests) == 2
    with running(Config(web=WebConfig(allowed_hosts=("lan.test",)))) as server:
        answer = page.goto(f"http://lan.test:{port_of(server)}/")
        assert answer is not None and answer.status == 200, "listed; the browser trusts it less, and says less"
        assert page.evaluate(ASK, ["", CHAT]) == [200, 200, 200, 415, 200, 415]


def test_I06_signing_in_works_over_plain_http_by_any_name(page: Page) -> None:
    """Such a browser sends no Sec-Fetch-Site, and `Origin: null` with a form of a page that forbids referrers."""
    with running(keyed(KEY)) as server:
        page.goto(f"http://lan.test:{port_of(server)}/dashboard")
        page.fill("input[name=key]", "sk-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=no valid key")
        page.fill("input[name=key]", KEY)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard")
        assert page.evaluate(ASK, ["", CHAT])[4] == 200
        assert len(server.engine.requests) == 1
