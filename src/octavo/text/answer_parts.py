"""Parts: what an answer is made of once content, reasoning and calls are told apart.

Owns: the four kinds of part. Does not: read any text.
"""

from __future__ import annotations

from msgspec import Struct


class Text(Struct, frozen=True):
    """Content for the user."""

    text: str


class Reasoning(Struct, frozen=True):
    """What the model says to itself."""

    text: str


class CallBegin(Struct, frozen=True):
    """A tool call; `index` counts the answer's calls from 0."""

    index: int
    call_id: str
    name: str


class CallArguments(Struct, frozen=True):
    """More of the arguments' JSON text; the texts of a call in a row are its arguments."""

    index: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments
