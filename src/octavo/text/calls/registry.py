"""The call formats by name.

Owns: the names, and the texts that mark calls in each. Does not: read any call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.text.answer_format import AnswerFormat
from octavo.text.calls.mistral import ARGS, CALL_ID, MARKER, MistralCalls
from octavo.text.calls.plain import PlainCalls
from octavo.text.calls.reader import CallReader, Output
from octavo.text.calls.tagged import TaggedCalls
from octavo.text.calls.xml import XmlCalls

PYTHON_TAG = "<|python_tag|>"
HERMES_TAGS = ("<tool_call>", "</tool_call>")
MISTRAL_DIGITS = 9  # the length that its templates require of an id

CALL_READERS: Mapping[str, Callable[[AnswerFormat, str], CallReader]] = {
    "hermes": lambda _, seed: TaggedCalls(Output(seed), HERMES_TAGS),
    "llama3": lambda known, seed: PlainCalls(Output(seed), known.names, PYTHON_TAG),
    "mistral": lambda _, seed: MistralCalls(Output(seed, MISTRAL_DIGITS)),
    "qwen3_coder": lambda known, seed: XmlCalls(Output(seed), known.texts),
    "json": lambda known, seed: PlainCalls(Output(seed), known.names),
}
CALL_MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": HERMES_TAGS,
    "llama3": (PYTHON_TAG,),
    "mistral": (MARKER, ARGS, CALL_ID),
    "qwen3_coder": HERMES_TAGS,
    "json": (),
}
