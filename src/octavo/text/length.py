"""Decide whether a text has too many tokens, without tokenizing all of it.

Owns: two lower bounds of the number of tokens: the text's length divided by that of the longest piece; and the tokens
of the text's parts, counted one part after the other until there are too many.
Does not: return ids.
Invariant: a text that fits is never reported as too long. Cutting before a single space divides no word, and most
tokenizers cut there themselves. With other tokenizers a cut adds a few tokens, which SPARE_PER_CUT allows for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

PART_CHARS = 16_384
SPARE_PER_CUT = 16
_LIKELY_CHARS = 5  # characters per token; a text with fewer per allowed token is not counted in parts
_SEARCH_CHARS = 1024  # characters at the end of a part in which to look for a place to cut


def num_tokens_if_over(tokenizer: Tokenizer, text: str, max_tokens: int) -> int | None:
    """Return a lower bound of the text's number of tokens if it is more than `max_tokens`, else None."""
    lower_bound = len(text) // tokenizer.longest_piece
    if lower_bound > max_tokens:
        return lower_bound
    if len(text) <= max(PART_CHARS, max_tokens * _LIKELY_CHARS):
        return None
    num = 0
    for part in _parts(text):
        num += tokenizer.count(part) - SPARE_PER_CUT
        if num > max_tokens:
            return num
    return None


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = _cut(text, start + PART_CHARS)
        yield text[start:end]
        start = end


def _cut(text: str, end: int) -> int:
    """Return the last position in the _SEARCH_CHARS before `end` with a single space between two words, else `end`."""
    if end >= len(text):
        return len(text)
    at, first = end, end - _SEARCH_CHARS
    while (at := text.rfind(" ", first, at)) > first:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return end
