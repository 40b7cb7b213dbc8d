"""Sections of a page that programs write: the text between two marks, in a page that is otherwise written by hand.

Owns: the marks, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Does not: make the text.
"""

from pathlib import Path


def read_section(page: Path, name: str) -> str:
    """Return the text between the marks. Raises ValueError for a page without them."""
    _, text, _ = _split(page, name)
    return text.strip() + "\n"


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the text between the marks. Raises ValueError for a page without them."""
    before, _, after = _split(page, name)
    page.write_text(f"{before}\n{text.strip()}\n\n{after}", encoding="utf-8")


def _split(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = (f"<!-- {name}: {word} -->\n" for word in ("begin", "end"))
    before, is_begun, rest = page.read_text(encoding="utf-8").partition(begin)
    text, is_ended, after = rest.partition(end)
    if not is_begun or not is_ended:
        raise ValueError(f"{page} has no section between {begin.strip()} and {end.strip()}")
    return before + begin, text, end + after
