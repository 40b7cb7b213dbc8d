"""A model's chat template: messages to prompt text.

Owns: compiling, rendering, and the errors of both.
Does not: tokenise, or change messages (messages.py does).
Invariants: output equals transformers' apply_chat_template on the same input; the sandbox bounds work and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template, TemplateError

from octavo.errors import InvalidRequestError, ModelFileError
from octavo.text.template_budget import Budget, render_within
from octavo.text.template_sandbox import TemplateEnvironment

_MAX_SOURCE_CHARS = 1 << 19
_RESERVED = frozenset(("self", "messages", "tools", "add_generation_prompt"))
# What a template may raise on data that it does not fit.
_DATA_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_SIZE_ERRORS = (RecursionError, MemoryError)


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """A compiled template. Safe to share between threads.

    The budget counts what the sandbox's own operations do. One operation inside C (comparing or sorting shared lists)
    can still take minutes and hold the interpreter's lock, so a server renders a template that is not trusted in a
    tool process, where it can be killed.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        max_output_chars: int = 4_000_000,
        path: object = "chat template",
        is_trusted: bool = False,
    ) -> None:
        """Compile. `tokens` are the named special tokens ("bos_token": "<s>"). Raises ModelFileError naming `path`."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelFileError(path, f"chat template has {len(source)} characters; {_MAX_SOURCE_CHARS} are supported")
        self.source = source
        self.is_trusted = is_trusted
        self.tokens = dict(tokens)
        self._max_output_chars = max_output_chars
        try:
            self._template: Template = _environment().from_string(source)
        except (TemplateError, SyntaxError, ValueError, *_SIZE_ERRORS) as error:
            raise ModelFileError(path, f"chat template cannot be compiled ({_reason(error)})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text. `kwargs` reach the template as variables.

        Raises InvalidRequestError when the template refuses the messages, fails on them, or exceeds its limits.
        """
        check_variables(kwargs)
        variables = {
            "documents": None,
            **self.tokens,
            **kwargs,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_within(Budget(self._max_output_chars), lambda: self._template.render(variables))
        except (*_DATA_ERRORS, *_SIZE_ERRORS) as error:
            raise InvalidRequestError(
                f"the chat template does not take these messages: {_reason(error)}", "messages"
            ) from error


def check_variables(names: Iterable[str]) -> None:
    """Refuse variables that the server sets itself. Raises InvalidRequestError."""
    if clash := _RESERVED.intersection(names):
        raise InvalidRequestError(f"{', '.join(sorted(clash))} cannot be set here", "chat_template_kwargs")


def _reason(error: BaseException) -> str:
    if isinstance(error, _SIZE_ERRORS):
        return "it is too large or nested too deeply"
    return (str(error).strip() or type(error).__name__)[:300]
