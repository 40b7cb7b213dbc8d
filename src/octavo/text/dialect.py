"""Dialect: how a model writes tool calls and reasoning, derived from its chat template; AnswerReader, which reads them.

Owns: the call formats and reasoning tags by name, the texts that mark calls, and the choice of a dialect; splitting an
answer's text into content, reasoning and tool calls as it arrives. Does not: render templates, or know an API.
Invariant: the parts' concatenated texts do not depend on how the text was split. The same seed gives the same call ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.calls.mistral import ARGS, CALL_ID, MARKER, MistralCalls
from octavo.text.calls.plain import PlainCalls
from octavo.text.calls.reader import CallReader, Output, held_at_end
from octavo.text.calls.tagged import TaggedCalls
from octavo.text.calls.xml import XmlCalls

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

PYTHON_TAG = "<|python_tag|>"
HERMES_TAGS = ("<tool_call>", "</tool_call>")
TAIL_IDS = 32  # last tokens of a prompt, decoded to find tags: a tag and whitespace take fewer
MISTRAL_DIGITS = 9  # length of a call id that Mistral's templates require

CALL_READERS: Mapping[str, Callable[[AnswerFormat, str], CallReader]] = {
    "hermes": lambda _, seed: TaggedCalls(Output(seed), HERMES_TAGS),
    "llama3": lambda answer_format, seed: PlainCalls(Output(seed), answer_format.names, PYTHON_TAG),
    "mistral": lambda _, seed: MistralCalls(Output(seed, MISTRAL_DIGITS)),
    "qwen3_coder": lambda answer_format, seed: XmlCalls(Output(seed), answer_format.texts),
    "json": lambda answer_format, seed: PlainCalls(Output(seed), answer_format.names),
}
CALL_MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": HERMES_TAGS,
    "llama3": (PYTHON_TAG,),
    "mistral": (MARKER, ARGS, CALL_ID),
    "qwen3_coder": HERMES_TAGS,
    "json": (),
}

Tags = tuple[str, str]
REASONING_TAGS: Mapping[str, Tags] = {
    "think": ("<think>", "</think>"),
    "thinking": ("<thinking>", "</thinking>"),
    "reasoning": ("<reasoning>", "</reasoning>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed": ("<seed:think>", "</seed:think>"),
}
# Other engines' names for these formats.
CALL_ALIASES = {"llama3_json": "llama3", "qwen3_xml": "qwen3_coder", "qwen": "hermes"}
REASONING_ALIASES = {"deepseek_r1": "think", "qwen3": "think", "command_a": "cohere", "seed_oss": "seed"}
WITHOUT_TEMPLATE = "hermes"  # the format that the prompt asks for if the template renders no tools
_VARIABLE = r"(?<![.\w'\"])tools\b(?!['\"])"
_TOOLS = re.compile(_VARIABLE)
_CODE = re.compile(r"\{%[^%]*|\{\{[^}]*")  # the code in a template
_EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's formats. `calls` is None if calls are not parsed. `reasoning` is None if the model writes none.

    `takes_tools`: the template renders tools itself. `effort_variables` are the template's variables that set how much
    the model reasons. `takes_images`: messages may have images.
    """

    calls: str | None = WITHOUT_TEMPLATE
    takes_tools: bool = False
    reasoning: Tags | None = None
    effort_variables: tuple[str, ...] = ()
    takes_images: bool = False

    def markers(self, has_tools: bool) -> tuple[str, ...]:
        """Return the texts that delimit parts of an answer. In some models, some of these texts are special tokens."""
        calls = CALL_MARKERS[self.calls] if has_tools and self.calls is not None else ()
        return (*calls, *(self.reasoning or ()))

    def shown_ids(self, has_tools: bool, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the special tokens that are not skipped, because they separate the parts of an answer."""
        ids = [tokenizer.backend.token_to_id(marker) for marker in self.markers(has_tools)]
        return tuple(sorted({token_id for token_id in ids if token_id in tokenizer.special_ids}))

    def reasoning_after(self, prompt: Sequence[int], tokenizer: Tokenizer) -> tuple[Tags | None, bool]:
        """Return the reasoning's tags (None if the prompt has closed them), and True if the prompt has opened them."""
        if self.reasoning is None:
            return None, False
        end = tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False).rstrip()
        return (None, False) if end.endswith(self.reasoning[1]) else (self.reasoning, end.endswith(self.reasoning[0]))


def text_arguments(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return `function.argument` for each argument whose schema is a string. `tools` are as templates expect them."""
    found: list[str] = []
    for function in (tool["function"] for tool in tools):
        properties = function["parameters"].get("properties")
        if isinstance(properties, dict):
            texts = [key for key, schema in properties.items() if isinstance(schema, dict) and _is_text(schema)]
            found += [f"{function['name']}.{key}" for key in texts]
    return tuple(found)


def _is_text(schema: Mapping[str, Any]) -> bool:
    if "enum" in schema and isinstance(schema["enum"], list):
        return all(isinstance(value, str) for value in schema["enum"])
    return schema.get("type") == "string"


def read_dialect(template: str | None, call_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
    """Return the dialect of a template. A parser other than "auto" (a name in config.CALL_PARSERS) takes precedence."""
    source = template or ""
    has_tools = takes_tools(source)
    calls: str | None = CALL_ALIASES.get(call_parser, call_parser)
    if calls == "auto":
        calls = _calls_of(source) if has_tools else WITHOUT_TEMPLATE
    tags = REASONING_TAGS.get(REASONING_ALIASES.get(reasoning_parser, reasoning_parser))
    if reasoning_parser == "auto":
        tags = next((tags for tags in REASONING_TAGS.values() if tags[1] in source), None)
    variables = tuple(name for name in _EFFORT_VARIABLES if re.search(rf"(?<![.\w'\"]){name}\b(?!['\"])", source))
    return Dialect(None if calls == "none" else calls, has_tools, tags, variables)


@lru_cache(maxsize=16)
def takes_tools(template: str) -> bool:
    """Return True if a template renders tools itself."""
    return any(_TOOLS.search(part[0]) for part in _CODE.finditer(template))


def _calls_of(source: str) -> str:
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<function=" in source and "<parameter=" in source:
        return "qwen3_coder"
    if "<tool_call>" in source:
        return "hermes"
    return "llama3" if "<|python_tag|>" in source or "<|eot_id|>" in source else "json"


# --- reading an answer ---------------------------------------------------------------------------------------

# Before the opening tag; after an opening tag in the prompt; in the reasoning; in the blanks after it; in the content.
_BEFORE, _OPENED, _INSIDE, _BLANK, _CONTENT = range(5)


class ReasoningReader:
    """Splits reasoning from content. An answer has reasoning if it begins with the opening tag, or inside the tags."""

    __slots__ = ("_close", "_has_reasoning", "_held", "_open", "_state", "num_characters")

    def __init__(self, tags: tuple[str, str], starts_inside: bool) -> None:
        self._open, self._close = tags
        self._state = _OPENED if starts_inside else _BEFORE
        self._held = ""
        self._has_reasoning = False  # some reasoning has been returned
        self.num_characters = 0  # of the reasoning returned so far

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""
        if self._state == _CONTENT:
            return [Text(text)] if text else []
        self._held += text
        parts: list[Part] = []
        if self._state == _BEFORE:
            self._before()
        if self._state == _OPENED:
            self._opened()
        if self._state == _INSIDE:
            parts += self._inside()
        if self._state == _BLANK:
            self._held = self._held.lstrip()
            self._state = _CONTENT if self._held else _BLANK
        if self._state == _CONTENT and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        if not held or self._state == _BLANK:
            return []
        if self._state == _BEFORE:
            return [Text(held)]
        self.num_characters += len(held)
        return [Reasoning(held)]

    def _before(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith(self._open):
            self._held = rest[len(self._open) :]
            self._state = _INSIDE
        elif not self._open.startswith(rest):
            self._state = _CONTENT

    def _opened(self) -> None:
        """Drop an opening tag that repeats the tag in the prompt, as some models write it."""
        self._held = self._held.lstrip()
        if self._held == self._open or not self._open.startswith(self._held):
            self._held = self._held.removeprefix(self._open)
            self._state = _INSIDE

    def _inside(self) -> list[Reasoning | Text]:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        end = self._held.find(self._close)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(self._close) :]
            self._state = _BLANK
        else:
            safe = self._held[: len(self._held) - held_at_end(self._held, self._close)].rstrip()
            thought, self._held = safe, self._held[len(safe) :]
        self._has_reasoning |= bool(thought)
        self.num_characters += len(thought)
        return [Reasoning(thought)] if thought else []


class AnswerReader:
    """The parts of one choice of one answer. If the format is None, everything is Text.

    `seed` is unique to this choice (the answer's id and the choice's number); call ids are derived from it.
    """

    def __init__(self, answer_format: AnswerFormat | None, seed: str) -> None:
        answer_format = answer_format or AnswerFormat()
        self._reasoning = (
            ReasoningReader(answer_format.reasoning, answer_format.starts_inside) if answer_format.reasoning else None
        )
        make: Callable[[AnswerFormat, str], CallReader] | None = (
            CALL_READERS[answer_format.calls] if answer_format.calls else None
        )
        self._calls = make(answer_format, seed) if make else None
        self._is_single = answer_format.is_single
        self._has_call = False
        self.num_characters = 0  # of all text

    @property
    def num_reasoning_characters(self) -> int:
        """Characters of the reasoning returned so far."""
        return 0 if self._reasoning is None else self._reasoning.num_characters

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text. A call's arguments are returned as they arrive."""
        self.num_characters += len(text)
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        else:
            parts = [Text(text)] if text else []
        return parts if self._calls is None else self._with_calls(self._calls, parts)

    def finish(self) -> list[Part]:
        """Return the text held back, at the end of the answer."""
        parts = self._reasoning.finish() if self._reasoning is not None else []
        if self._calls is None:
            return parts
        return self._with_calls(self._calls, parts) + self._keep(self._calls.finish())

    def _with_calls(self, reader: CallReader, split: list[Part]) -> list[Part]:
        """Return the parts, with calls extracted from the content."""
        parts: list[Part] = []
        for part in split:
            parts += self._keep(reader.push(part.text)) if isinstance(part, Text) else [part]
        return parts

    def _keep(self, parts: list[Part]) -> list[Part]:
        """Return the parts to keep: all, or with `is_single` only those up to the end of the first call."""
        if not self._is_single:
            return parts
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin | CallArguments):
                self._has_call = True
                kept += [part] if part.index == 0 else []
            elif not self._has_call:
                kept.append(part)
        return kept
