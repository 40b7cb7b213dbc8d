"""Words that the project does not use: in names, comments, docstrings, messages, pages and documents.

Owns: the list, and the check that no file of src, tools, csrc or docs has one. Does not: judge style beyond the list.
A word is banned because readers stumbled over it, and because the field has a plain one.
"""

import io
import re
import tokenize

import pytest

from tests.source_tree import ROOT, modules

INSTEAD = {
    "nobody": "no client, no request, none",
    "everybody": "all",
    "everyone": "all",
    "somebody": "a client, a reader, one",
    "anybody": "any client",
    "whoever": "the one which",
    "whom": "which",
    "custody": "open requests",
    "heir": "resumed request",
    "bereaved": "open request of a lost engine",
    "convict": "crash suspect",
    "seat": "ticket, slot",
    "wish": "request",
    "bell": "wakeup",
    "pulse": "status line, heartbeat",
    "oracle": "forecaster, reference",
    "told": "reported, sent, logged",
    "said": "answered, reported, stated",
    "lest": "so that ... not",
    "foe": "attacker",
}
PHRASES = ["tells of", "gives way", "given way", "stands in", "behind line"]
BARE = {"asked", "begun"}
SUFFIXES = {".py", ".js", ".html", ".css", ".cpp", ".h", ".md", ".toml", ".yml", ".yaml", ".csv"}
FOLDERS = [ROOT / name for name in ("src", "tools", "csrc", "docs")]
FILES = [path for folder in FOLDERS for path in folder.rglob("*") if path.suffix in SUFFIXES] + [ROOT / "README.md"]
# Words of a protocol, of a conversation that a check sends, or of an exported name that has to stay.
ALLOWED = [
    r"Is anybody there\?",
    r'"anybody"',
    r"`anybody`",
    r"_given_way",
    r'"given_way"',
    r"\.given_way,",
    "Nobody in the village",
]


def banned(text: str) -> list[str]:
    """Return each banned word and phrase with its line: `line: word`, names split at underscores and capitals."""
    for pattern in ALLOWED:
        text = re.sub(pattern, "", text)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"([a-z])([A-Z])", r"\1 \2", line).replace("_", " ").lower()
        hits = [word for word in re.findall(r"[a-z]+", words) if word.removesuffix("s") in INSTEAD or word in INSTEAD]
        hits += [phrase for phrase in PHRASES if re.search(rf"\b{phrase}\b", words)]
        found += [f"{number}: {hit}" for hit in hits]
    return found


def riddles(text: str) -> list[str]:
    """Return each Python name that is a bare participle, with its line: give it a noun instead."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = ((token.start[0], token.string) for token in tokens if token.type == tokenize.NAME)
    return [f"{line}: {name}" for line, name in names if name.strip("_").lower() in BARE]


def test_no_file_has_a_banned_word() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    assert {path: found for path, text in texts.items() if (found := banned(text))} == {}, f"instead: {INSTEAD}"


def test_no_name_is_a_bare_participle() -> None:
    found = {module.path: riddles(module.text) for module in modules()}
    assert {path: names for path, names in found.items() if names} == {}
    assert riddles("asked = 1\nself._begun(asked_s)\n") == ["1: asked", "2: _begun"]


@pytest.mark.parametrize(
    "text", ["nobody waits", "self._told = 1", "class CustodyOf: ...", "EngineSeats", "behind line 3"]
)
def test_the_check_finds(text: str) -> None:
    assert banned(text)


def test_the_check_passes_plain_words() -> None:
    assert banned("a bellwether, the wished-for: seating, impulses_per_s = 1; the request is behind a proxy") == []
