"""Token ids to text, as they come.

Owns: at most three bytes of an unfinished character, and whether the text has begun.
Does not: keep ids or text: each id costs the same, the 32,000th as the first.
Invariants: the deltas, with flush(), concatenate to Tokenizer.decode of all ids, however the ids are split; no delta
holds half a character. Bytes that are no UTF-8 become U+FFFD by Unicode's rule (one for each maximal subpart).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing sequence of ids."""

    __slots__ = ("_begun", "_pieces", "_skipped_ids", "_strip", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown_special_ids: tuple[int, ...] = ()
    ) -> None:
        """`shown_special_ids` are not skipped."""
        self._pieces = tokenizer.pieces
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_special_ids:
            self._skipped_ids = self._skipped_ids.difference(shown_special_ids)
        self._strip = self._pieces.strip_start
        self._begun = False
        self._utf8 = _Utf8Decoder("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the characters that these ids complete."""
        kept = [token_id for token_id in ids if token_id not in self._skipped_ids]
        if not kept:
            return ""
        of = self._pieces.of
        if self._begun:
            return self._cut_start(self._utf8.decode(b"".join(map(of, kept))))
        self._begun = True
        return self._cut_start(self._utf8.decode(self._pieces.at_start(kept[0]) + b"".join(map(of, kept[1:]))))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._cut_start(self._utf8.decode(b"", True))

    @property
    def num_held_bytes(self) -> int:
        """Bytes of the unfinished character, at most 3: all that this object remembers of the ids."""
        return len(self._utf8.getstate()[0])

    def _cut_start(self, text: str) -> str:
        while self._strip and text:
            self._strip = self._strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ") if text[0] == " " else text
        return text
