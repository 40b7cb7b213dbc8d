"""Whether a text has too many tokens, found out without tokenizing all of it.

Owns: the two bounds: no token is longer than the vocabulary's longest piece; the tokens of the parts of a text, counted
one part after the other until there are too many.
Does not: give ids.
Invariant: a text that fits is never said to be too long. A cut before a single space divides no word, and most
tokenizers cut there themselves; where they do not, a cut adds a few tokens, for which SPARE_PER_CUT allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

PART_CHARS = 16_384
SPARE_PER_CUT = 16
_LIKELY_CHARS = 5  # characters per token; a text with fewer for each token that fits is tokenized at once
_SEARCH_CHARS = 1024  # before the end of a part, for a place to cut


def num_tokens_if_over(tokenizer: Tokenizer, text: str, most: int) -> int | None:
    """Give a number of tokens that the text has at least, when that is more than `most`; else None."""
    least = len(text) // tokenizer.longest_piece
    if least > most:
        return least
    if len(text) <= max(PART_CHARS, most * _LIKELY_CHARS):
        return None
    num = 0
    for part in _parts(text):
        num += tokenizer.count(part) - SPARE_PER_CUT
        if num > most:
            return num
    return None


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = _cut(text, start + PART_CHARS)
        yield text[start:end]
        start = end


def _cut(text: str, end: int) -> int:
    """Return the last place shortly before `end` with a single space between two words, or `end`."""
    if end >= len(text):
        return len(text)
    at, first = end, end - _SEARCH_CHARS
    while (at := text.rfind(" ", first, at)) > first:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return end
