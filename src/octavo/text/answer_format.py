"""AnswerFormat: how content, reasoning and calls are told apart in what a model writes.

Owns: the format as plain data. Does not: read any text (AnswerReader), or choose a format from a template.
"""

from __future__ import annotations

from msgspec import Struct


class AnswerFormat(Struct, frozen=True, array_like=True):
    """Plain data, which travels with an answer's form. As it is, everything is text.

    `reasoning` are the tags around the reasoning, and `starts_inside` says that the prompt has opened them already.
    `calls` names the format of tool calls, None when none can be made. `names` are the functions that may be called,
    `forced` what the calls are held to by a grammar: "required" or "named". `texts` are the arguments, each as
    "function.argument", whose schemas say that they are strings: some formats do not tell.
    With `is_single` nothing counts behind the first call.
    """

    reasoning: tuple[str, str] | None = None
    starts_inside: bool = False
    calls: str | None = None
    forced: str | None = None
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_single: bool = False
