"""AnswerFormat: how to separate content, reasoning and tool calls in a model's output.

Owns: the format as plain data. Does not: read any text (AnswerReader), or choose a format from a template.
"""

from __future__ import annotations

from msgspec import Struct


class AnswerFormat(Struct, frozen=True, array_like=True):
    """The format of one answer, as plain data. With the default values the whole answer is text.

    `reasoning` is the pair of tags around the reasoning; with `starts_inside` the prompt ends inside it.
    `calls` names the format of tool calls, None when none can be made. `names` are the functions that may be called;
    `forced` is "required" or "named" when a grammar forces calls. `texts` are the arguments, each as
    "function.argument", whose schemas say that they are strings: some formats do not mark strings.
    With `is_single` everything after the first call is dropped.
    """

    reasoning: tuple[str, str] | None = None
    starts_inside: bool = False
    calls: str | None = None
    forced: str | None = None
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_single: bool = False
