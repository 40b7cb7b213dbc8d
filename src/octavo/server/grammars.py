"""Structured answers: from the fields that constrain an answer to a compiled grammar.

Owns: the choice among those fields, refusing what cannot be combined with them, the cache of compiled grammars, one
compilation for equal concurrent requests. Does not: compile (the sandbox process does, within its time and memory).
Invariant: the cache holds at most MAX_CACHED grammars and MAX_CACHED_CHARACTERS characters, sources included.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequestError, OctavoError
from octavo.sandbox.pool import Sandbox
from octavo.sandbox.wire import CompileGrammar
from octavo.server.bodies.sampling import SamplingBody
from octavo.server.bodies.structure import given_structures
from octavo.server.http.errors import ApiError, bad_field, from_exception, with_field

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel

MAX_CACHED = 256
MAX_CACHED_CHARACTERS = 4 << 20
_Key = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class Structure:
    """The constraint of an answer: a kind of grammar and its source. `param` is the field that gave it.

    `whitespace`: an expression for the whitespace between the parts of JSON; None is a space after , and :.
    """

    kind: str
    source: str
    param: str
    whitespace: str | None = None
    whitespace_param: str = ""


def structure_of(body: SamplingBody) -> Structure | None:
    """Return the constraint in a body; None if it has none. Raises ApiError naming the field."""
    given = given_structures(body)
    if len(given) > 1:
        (first, *_), (second, *_) = given[:2]
        raise bad_field(second, f"{second} says what the answer must be, and so does {first}; leave one of them out")
    whitespace_param, whitespace = _whitespace(body)
    if not given:
        if body.structured_outputs is not None:
            message = "structured_outputs asks for nothing; give json, json_object, regex, choice or grammar"
            raise bad_field("structured_outputs", message)
        if whitespace is not None:
            raise bad_field(whitespace_param, f"{whitespace_param} goes with a JSON schema; none is given")
        return None
    param, kind, source = given[0]
    if source is None:
        param = param.removesuffix(".schema")
        raise bad_field(param, f"{param} is missing", "missing_field")
    if whitespace is not None and not kind.startswith("json"):
        raise bad_field(whitespace_param, f"{whitespace_param} goes with JSON; {param} is not about JSON")
    _check_beside(body, param)
    return Structure(kind, json.dumps(source) if kind == "choice" else source, param, whitespace, whitespace_param)


def _whitespace(body: SamplingBody) -> tuple[str, str | None]:
    outputs = body.structured_outputs
    if outputs is not None and outputs.disable_any_whitespace:
        if outputs.whitespace_pattern:
            message = "disable_any_whitespace and whitespace_pattern are given; leave one of them out"
            raise bad_field("structured_outputs.whitespace_pattern", message)
        return "structured_outputs.disable_any_whitespace", ""
    if outputs is not None and outputs.whitespace_pattern is not None:
        return "structured_outputs.whitespace_pattern", outputs.whitespace_pattern
    return "guided_whitespace_pattern", body.guided_whitespace_pattern


def _check_beside(body: SamplingBody, param: str) -> None:
    """Refuse the fields that cannot be combined with a grammar."""
    ends = f"{param} says when an answer ends; leave"
    if body.min_tokens:
        raise bad_field("min_tokens", f"min_tokens is {body.min_tokens}; {ends} min_tokens out")
    if body.ignore_eos:
        raise bad_field("ignore_eos", f"ignore_eos is true; {ends} ignore_eos out")
    if body.use_beam_search:
        raise bad_field("use_beam_search", f"use_beam_search is true; beams follow no {param}; leave one of them out")


class GrammarReader:
    """A cache that compiles grammars, in one event loop."""

    def __init__(self, sandbox: Sandbox, text: TextModel) -> None:
        self._sandbox = sandbox
        self._vocab_size = text.spec.vocab_size
        ids = sorted(token for token in text.tokenizer.special_ids if token < self._vocab_size)
        self._specials = {token: text.tokenizer.id_to_piece(token) for token in ids}
        self._compiled: OrderedDict[_Key, str] = OrderedDict()
        self._num_characters = 0
        self._running: dict[_Key, asyncio.Task[str]] = {}

    async def read(self, kind: str, source: str, whitespace: str | None = None) -> str:
        """Return the compiled source of one of octavo.grammar.compile.KINDS. Raises RequestError, EngineError."""
        key = (kind, source, whitespace)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._compile(key))
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    async def read_structure(self, structure: Structure) -> str:
        """Return the compiled structure of a body. Raises ApiError naming its field."""
        try:
            return await self.read(structure.kind, structure.source, structure.whitespace)
        except OctavoError as error:
            raise refusal(error, structure) from None

    def reader(self, structure: Structure | None) -> Callable[[], Awaitable[str]] | None:
        """Return a function that compiles the structure; None without one."""
        if structure is None:
            return None
        asked = structure
        return lambda: self.read_structure(asked)

    async def _compile(self, key: _Key) -> str:
        kind, source, whitespace = key
        order = CompileGrammar(kind, source, whitespace, self._vocab_size, self._specials)
        return str(await self._sandbox.run("compile_grammar", order))

    def _ended(self, key: _Key, task: asyncio.Task[str]) -> None:
        self._running.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._compiled[key] = task.result()
        self._num_characters += _size(key, task.result())
        while len(self._compiled) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            oldest, grammar = self._compiled.popitem(last=False)
            self._num_characters -= _size(oldest, grammar)


def refusal(error: OctavoError, structure: Structure) -> ApiError:
    """Return the refusal of a grammar that did not compile, with the name of the client's field."""
    if not isinstance(error, InvalidRequestError):
        return from_exception(error)
    param = structure.whitespace_param if error.param == "whitespace_pattern" else structure.param
    return bad_field(param, with_field(str(error), error.param, param), error.code)


def _size(key: _Key, grammar: str) -> int:
    return len(key[1]) + len(grammar)
