"""An answer as plain data: the format of a model's output, and the kinds of its parts.

Owns: AnswerFormat and the four kinds of part. Does not: read text (AnswerReader does), or choose a format.
"""

from __future__ import annotations

from msgspec import Struct


class AnswerFormat(Struct, frozen=True, array_like=True):
    """The format of one answer. With the default values the whole answer is text.

    `reasoning` is the pair of tags around the reasoning; `starts_inside`: the prompt ends after the opening tag.
    `calls` names the format of tool calls; None if no call can be made. `names` are the functions that may be called.
    `forced` is "required" or "named" if a grammar forces calls. `texts` lists the arguments, as "function.argument",
    that are strings by their schemas; some formats do not mark strings. `is_single`: everything after the first call
    is dropped.
    """

    reasoning: tuple[str, str] | None = None
    starts_inside: bool = False
    calls: str | None = None
    forced: str | None = None
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_single: bool = False


class Text(Struct, frozen=True):
    """Content for the user."""

    text: str


class Reasoning(Struct, frozen=True):
    """The model's reasoning before its answer."""

    text: str


class CallBegin(Struct, frozen=True):
    """The beginning of a tool call. `index` counts the answer's calls from 0."""

    index: int
    call_id: str
    name: str


class CallArguments(Struct, frozen=True):
    """More of a call's arguments. The texts of one call, concatenated, are the JSON of its arguments."""

    index: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments
