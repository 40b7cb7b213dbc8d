"""`/`: a page for browsers, a word for programs; tests/browser shows the page at work."""

from __future__ import annotations

import re

from octavo.dashboard.page import STATIC
from tests.server.fakes import Harness

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


async def test_I06_browsers_get_the_chat_page_and_programs_a_word() -> None:
    harness = Harness()
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        word = await harness.get("/", headers=accept)
        assert word.text == "Octavo is running" and word.headers["vary"] == "Accept"
    page = await harness.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept", "a cache between may not mix them up"
    again = await harness.get("/", headers={**BROWSER, "if-none-match": page.headers["etag"]})
    assert again.status_code == 304


async def test_I06_the_pages_policy_lets_no_text_become_html_or_a_script() -> None:
    page = await Harness().get("/", headers=BROWSER)
    rules = dict(rule.strip().partition(" ")[::2] for rule in page.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'self'" and "script-src" not in rules
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["object-src"] == "'none'"


async def test_I06_every_file_that_the_page_names_is_there_and_here() -> None:
    harness = Harness()
    todo, seen = ["chat.html"], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = await harness.get("/" if name == "chat.html" else f"/static/{name}", headers=BROWSER)
        assert found.status_code == 200, name
        addresses = re.findall(r'(?:src|href|action)="([^"]*)"|from "([^"]*)"', found.text)
        for address in (one or other for one, other in addresses):
            assert not re.match(r"[a-z]+:|/", address) or address == "data:,", f"{name} names {address}"
            if address.startswith(("static/", "./")):
                todo.append(address.rpartition("/")[2])
    assert {path.name for path in STATIC.glob("chat*")} <= seen, "and no file is left over"
