"""The pages' files: the listing, the headers, one page that holds everything, and what must not be in any of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.dashboard import page
from octavo.dashboard.page import HEADERS, STATIC, asset, bundle, login_page, modules, write_page

FRAMES = [{"k": "head", "model": "</script><b>"}, {"k": "end", "t": 1.0}]
_TOP = re.compile(r"^(?:export )?(?:async )?(function\*?|class|const|let|var) +([\w$]+)([^;\n]*)", re.MULTILINE)


def frames_in(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    packed = re.search(r'id="frames">([^<]*)</script>', text)
    assert packed is not None
    return [json.loads(line) for line in zlib.decompress(base64.b64decode(packed[1]), 31).splitlines()]


@pytest.mark.parametrize("name", ["", ".", "..", "../page.py", "theme.css/", "/etc/passwd", "THEME.CSS", "theme.css\0"])
def test_only_what_is_listed_is_a_file(name: str) -> None:
    assert asset(name) is None


def test_every_file_has_a_type_and_is_small() -> None:
    total = 0
    for path in STATIC.iterdir():
        found = asset(path.name)
        assert found is not None, path
        total += len(found[0])
    assert total < 400_000
    assert asset("dashboard.js") == ((STATIC / "dashboard.js").read_bytes(), "text/javascript")


def test_pages_ask_for_nothing_from_elsewhere() -> None:
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        urls = re.findall(r"""(?:https?:)?//[\w.-]+\.\w+""", re.sub(r"https?://www\.w3\.org/", "", text))
        outside = [url for url in urls if url.startswith(("http", "//")) and "127.0.0.1" not in url]
        assert not outside, (path.name, outside)
        assert not re.search(r"@import|await import\(", text), path.name


def test_pages_have_no_script_or_style_of_their_own_inside() -> None:
    for path in STATIC.glob("*.html"):
        text = path.read_text(encoding="utf-8").replace("<style>{style}</style>", "")
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text), path.name


def test_scripts_never_make_markup_or_code_of_text() -> None:
    for path in STATIC.glob("*.js"):
        found = re.search(
            r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b *[(=]", path.read_text()
        )
        assert found is None, (path.name, found)


def test_the_policy_is_strict() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy


def test_modules_come_after_what_they_import() -> None:
    order = modules("dashboard.js")
    assert order[-1] == "dashboard.js" and len(order) == len(dict.fromkeys(order))
    for place, name in enumerate(order):
        for imported in page._IMPORT.findall(page.text_of(name)):
            assert order.index(imported) < place, (name, imported)


def test_the_names_at_the_top_of_the_dashboards_modules_differ() -> None:
    names: dict[str, str] = {}
    for module in modules("dashboard.js"):
        for kind, first, rest in _TOP.findall(page.text_of(module)):
            more = re.findall(r", ([\w$]+) = ", rest) if kind in ("const", "let") else []
            for name in (first, *more):
                assert names.setdefault(name, module) == module, f"{name} is in {names[name]} and {module}"
    assert {"Store", "Timeline", "element", "indexAbove"} <= names.keys()


def test_the_bundle_has_no_imports_and_exports_left() -> None:
    assert not re.search(r"^\s*(import|export)\b", bundle("dashboard.js"), re.MULTILINE)


def test_imports_and_exports_are_written_as_the_bundle_needs_them() -> None:
    for name in modules("dashboard.js"):
        text = page.text_of(name)
        assert not re.search(r"^export (default|\{|\*)|\bimport .* as ", text, re.MULTILINE), name
        assert len(re.findall(r"^import\b", text, re.MULTILINE)) == len(page._IMPORT.findall(text)), name


def test_I06_the_written_page_holds_frames_scripts_and_styles_allowed_by_their_hashes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(FRAMES, path)
    text = path.read_text(encoding="utf-8")
    assert frames_in(path) == FRAMES
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    for tag, directive in (("style", "style-src"), ('script type="module"', "script-src")):
        inside = re.search(f"<{tag}>(.*?)</{tag.split()[0]}>", text, re.DOTALL)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1]
    assert not re.search(r'(src|href)="(?!data:|#|\./)', text)


def test_a_large_recording_is_written_as_it_comes(tmp_path: Path) -> None:
    """Never more than a few frames are there at once."""
    alive = 0
    most = 0

    class Frame(dict[str, object]):
        def __init__(self, number: int) -> None:
            nonlocal alive, most
            super().__init__(k="step", n=number, x=hashlib.sha256(str(number).encode()).hexdigest() * 20)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def made() -> Iterator[Frame]:
        for number in range(2000):
            yield Frame(number)

    path = tmp_path / "page.html"
    write_page(made(), path)
    assert most < 10
    assert [frame["n"] for frame in frames_in(path)] == list(range(2000))


def test_the_login_form_shows_texts_as_texts() -> None:
    text, policy = login_page('<b>"no"</b>', '"><script>')
    assert "<b>" not in text and "&lt;b&gt;" in text and "<script" not in text
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
