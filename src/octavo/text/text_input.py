"""Texts as clients give them, before a model's tokenizer and template see them.

Owns: a text or pair to embed or score, and the mark of an image's place in a message. Does not: load a tokenizer, so
that reading a request's body loads none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

IMAGE_MARK = "\ue000octavo-image\ue001"  # the place of an image in a message's text


class TextInput(NamedTuple):
    """A text with the prompt before it (None: an encoder's default prompt), or a pair of texts for a classifier."""

    text: str
    second: str | None = None
    prefix: str | None = None

    @property
    def num_characters(self) -> int:
        """The characters of the text, or of both."""
        return len(self.text) + len(self.second or "")


def join_parts(parts: Sequence[str]) -> str:
    """Return a message's text: text parts are joined by line breaks; an image's mark directly joins its neighbours."""
    text = "\n".join(parts)
    return text.replace("\n" + IMAGE_MARK, IMAGE_MARK).replace(IMAGE_MARK + "\n", IMAGE_MARK)
