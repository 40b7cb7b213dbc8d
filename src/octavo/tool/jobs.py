"""The jobs that a tool process can do: name -> argument and function.

Owns: the registry. A new job is one line here and its argument in wire.
Does not: bound time or memory (child and process do).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2.debug  # noqa: F401  (jinja2 loads it at a template's first error)
import msgspec

from octavo.errors import EngineError, OctavoError
from octavo.text.chat_template import ChatTemplate
from octavo.tool.grammar_check import compile_checked
from octavo.tool.regex_check import check_regex
from octavo.tool.schema_check import check_schema
from octavo.tool.wire import CheckRegex, CheckSchema, CompileGrammar, FrameError, RenderChat


@dataclass(frozen=True, slots=True)
class Job:
    """A job's argument type and its function, which returns plain values or raises an OctavoError."""

    argument: type[msgspec.Struct]
    do: Callable[[Any], object]


def _render_chat(asked: RenderChat) -> str:
    template = _template(asked.source, tuple(asked.tokens.items()))
    return template.render(asked.messages, asked.add_generation_prompt, asked.tools, **asked.variables)


@lru_cache(maxsize=4)
def _template(source: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(tokens))


JOBS: Mapping[str, Job] = {
    "render_chat": Job(RenderChat, _render_chat),
    "check_schema": Job(CheckSchema, lambda asked: check_schema(asked.text)),
    "check_regex": Job(CheckRegex, lambda asked: check_regex(asked.pattern)),
    "compile_grammar": Job(CompileGrammar, compile_checked),
}


_CODECS = ("ascii", "latin_1", "unicode_escape", "raw_unicode_escape", "utf_16", "utf_32", "idna", "punycode")
_TEMPLATE = (
    "{%- macro m(x) -%}{{ x|trim|upper }}{%- endmacro -%}{% set n = namespace(a=1) %}{% for x in messages %}"
    "{{ m('\\u00e9\\n\\t') ~ x|tojson(indent=1) }}{% set n.a = loop.index %}{% endfor %}{{ strftime_now('%d %b %Y') }}"
    "{{ [2, 1]|sort|join(',')|replace('1', '3')|title }}{{ '%s'|string|escape }}{{ raise_exception('x') }}"
)


def warm_up() -> None:
    """Load what jobs load on first use; after this call the process can open no file."""
    for name in _CODECS:
        codecs.lookup(name)
    for work in (
        lambda: ChatTemplate(_TEMPLATE, {}).render([{"content": "x"}]),
        lambda: ChatTemplate("{% for", {}),
        lambda: check_schema('{"pattern": "("}'),
        lambda: compile_checked(CompileGrammar("json_schema", '{"type": "integer", "minimum": "x"}')),
        lambda: compile_checked(CompileGrammar("lark", 'root ::= "a" | [^b]+')),
    ):
        try:
            work()
        except OctavoError:
            continue


def do(jobs: Mapping[str, Job], name: str, packed: msgspec.Raw) -> object:
    """Run a job. Raises the job's errors, or EngineError for an unknown job or a malformed argument."""
    job = jobs.get(name)
    if job is None:
        raise EngineError(f"no job {name!r}")
    try:
        argument = msgspec.msgpack.decode(packed, type=job.argument)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"not an argument of {name}: {error}") from None
    return job.do(argument)
