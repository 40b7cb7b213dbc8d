"""Texts as clients give them, before a model's tokenizer and template see them.

Owns: a text or pair to embed or score. Does not: load a tokenizer, so that reading a request's body loads none either.
"""

from __future__ import annotations

from typing import NamedTuple


class TextInput(NamedTuple):
    """A text with the prompt before it (None: an encoder's default prompt), or a pair of texts for a classifier."""

    text: str
    second: str | None = None
    prefix: str | None = None

    @property
    def num_characters(self) -> int:
        """The characters of the text, or of both."""
        return len(self.text) + len(self.second or "")
