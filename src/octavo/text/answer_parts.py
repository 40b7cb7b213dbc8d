"""Parts: the pieces of an answer, as content, reasoning and tool calls.

Owns: the four kinds of part. Does not: read any text.
"""

from __future__ import annotations

from msgspec import Struct


class Text(Struct, frozen=True):
    """Content for the user."""

    text: str


class Reasoning(Struct, frozen=True):
    """The model's reasoning before its answer."""

    text: str


class CallBegin(Struct, frozen=True):
    """A tool call; `index` counts the answer's calls from 0."""

    index: int
    call_id: str
    name: str


class CallArguments(Struct, frozen=True):
    """More of a call's arguments; a call's texts, concatenated, are the JSON of its arguments."""

    index: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments
