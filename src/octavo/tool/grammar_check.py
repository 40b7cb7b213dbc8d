"""Whether the source of a grammar is small and plain enough to be compiled, and compiling it.

Owns: the bounds on each kind of source. Does not: compile (octavo.grammar.compile does), or bound time and memory.
Invariant: what is compiled here compiles again, where the engine follows it, in a small part of a job's time.
"""

from __future__ import annotations

import time

from octavo.errors import TooComplexError
from octavo.grammar.compile import compile_grammar
from octavo.grammar.trial import Specials
from octavo.tool.regex_check import check_regex
from octavo.tool.schema_check import check_schema
from octavo.tool.wire import CompileGrammar

MAX_SOURCE_BYTES = 65_536
MAX_COMPILED_CHARACTERS = 1 << 20  # as SamplingParams takes
MAX_COMPILE_S = 0.5  # of processor time: the engine does it once more, for every request


def compile_checked(asked: CompileGrammar) -> str:
    """Compile a source that is within the bounds. Raises TooComplexError or InvalidRequestError."""
    kind, source = asked.kind, asked.source
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise TooComplexError(f"the {kind} has {size} bytes; at most {MAX_SOURCE_BYTES} are taken")
    if kind == "json_schema":
        check_schema(source)
    elif kind == "regex":
        check_regex(source)
    if asked.whitespace:
        check_regex(asked.whitespace, "whitespace_pattern")
    specials = Specials(asked.vocab_size, tuple(asked.specials.items())) if asked.specials else None
    begun = time.process_time()
    text = compile_grammar(kind, source, asked.whitespace, specials)
    took = time.process_time() - begun
    if took > MAX_COMPILE_S:
        raise TooComplexError(f"the {kind} takes {took:.1f} s to compile; at most {MAX_COMPILE_S} s are given")
    if len(text) > MAX_COMPILED_CHARACTERS:
        reason = f"{len(text)} characters when compiled; at most {MAX_COMPILED_CHARACTERS} are taken"
        raise TooComplexError(f"the {kind} has {reason}")
    return text
