"""The documentation as a site: every page is in its contents, and with the extra `docs` it builds without a warning."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.source_tree import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def pages(nav: Any) -> list[str]:
    """Names of pages in a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages(part)]


def test_every_page_is_in_the_contents_once() -> None:
    named = pages(yaml.safe_load(CONFIG)["nav"])
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(named) == there and len(named) == len(there)


def test_the_pages_link_only_to_what_is_there() -> None:
    broken = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_the_site_asks_for_nothing_from_elsewhere() -> None:
    config = yaml.safe_load(CONFIG)
    assert config["theme"]["font"] is False and config["strict"] is True
    assert not re.search(r"https?://", CONFIG)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning_and_has_the_reference(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "python.html").read_text()
    assert all(word in reference for word in ("SamplingParams", "generate", "InvalidRequestError"))
    fetched = re.findall(r'<(?:script|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)"', reference)
    assert fetched == []
