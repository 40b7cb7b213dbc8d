"""Check that the source of a grammar is small and simple enough to be compiled, and compile it.

Owns: the bounds on each kind of source. Does not: compile (octavo.grammar.compile does), or bound time and memory.
Invariant: a grammar accepted here also compiles in the engine, in a fraction of a job's time.
"""

from __future__ import annotations

import time

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.grammar.answer import read_answer
from octavo.grammar.compile import compile_grammar
from octavo.grammar.trial import Specials
from octavo.tool.regex_check import check_regex
from octavo.tool.schema_check import check_schema
from octavo.tool.wire import CompileGrammar

MAX_SOURCE_BYTES = 65_536
MAX_ANSWER_BYTES = 1 << 20  # of all schemas of an answer's tools together
MAX_COMPILED_CHARACTERS = 1 << 20  # SamplingParams' bound
MAX_COMPILE_S = 0.5  # of processor time: the engine compiles it again, for every request


def compile_checked(asked: CompileGrammar) -> str:
    """Compile a source that is within the bounds. Raises TooComplexError or InvalidRequestError."""
    kind = asked.kind
    _check_source(kind, asked.source)
    if asked.whitespace:
        check_regex(asked.whitespace, "whitespace_pattern")
    specials = Specials(asked.vocab_size, tuple(asked.specials.items())) if asked.specials else None
    begun = time.process_time()
    text = compile_grammar(kind, asked.source, asked.whitespace, specials)
    took = time.process_time() - begun
    if took > MAX_COMPILE_S:
        raise TooComplexError(f"it takes {took:.1f} s to compile; at most {MAX_COMPILE_S} s are given")
    if len(text) > MAX_COMPILED_CHARACTERS:
        raise TooComplexError(f"it has {len(text)} characters when compiled; at most {MAX_COMPILED_CHARACTERS} fit")
    return text


def _check_source(kind: str, source: str) -> None:
    size = len(source.encode("utf-8", "surrogatepass"))
    most = MAX_ANSWER_BYTES if kind == "answer" else MAX_SOURCE_BYTES
    if size > most:
        raise TooComplexError(f"it has {size} bytes; at most {most} are taken")
    if kind == "json_schema":
        check_schema(source)
    elif kind == "regex":
        check_regex(source)
    elif kind == "answer":
        _check_answer(source)


def _check_answer(source: str) -> None:
    """Check the parts of an answer; its own form is checked when it is compiled."""
    answer = read_answer(source)
    for index, (_, schema) in enumerate([] if answer.calls is None else answer.calls.tools):
        place = f"tools[{index}].function.parameters"
        try:
            check_schema(schema)
        except InvalidRequestError as error:
            raise type(error)(f"{place}: {str(error).removeprefix('schema').lstrip(': ')}", place) from None
    if answer.structure is not None:
        kind, inner, whitespace = answer.structure
        if kind != "answer":
            _check_source(kind, inner)
        if whitespace:
            check_regex(whitespace, "whitespace_pattern")
