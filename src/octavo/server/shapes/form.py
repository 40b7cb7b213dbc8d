"""Form: what an answer's shape is made from.

Owns: the form, and the registry of shapes. Does not: write any answer.
Invariant: the same form and deltas give the same bytes, so that an answer can be shaped again, by another server too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from octavo.server.answer_formats import read_format
from octavo.server.shapes.anthropic import MessagesShape
from octavo.server.shapes.chat import ChatShape
from octavo.server.shapes.completion import CompletionShape
from octavo.server.shapes.ollama import OllamaShape
from octavo.server.shapes.responses import ResponseShape
from octavo.server.shapes.scored_chat import ScoredChatShape

if TYPE_CHECKING:
    from octavo.server.answer import Pieces
    from octavo.server.shapes.shape import Shape


class Form(Struct, frozen=True, array_like=True):
    """Plain data. `kind` names the shape; `facts` holds what one kind alone needs."""

    kind: str
    identity: tuple[str, int, str]
    include_usage: bool = False
    echoes: tuple[str, ...] = ("",)
    n: int = 1
    facts: dict[str, Any] = {}

    def shape(self, pieces: Pieces) -> Shape:
        """A new shape, which has given nothing yet."""
        return SHAPES[self.kind](self, pieces)


SHAPES: Mapping[str, Callable[[Form, Pieces], Shape]] = {
    "chat": lambda form, pieces: ChatShape(form.identity, pieces, form.include_usage, read_format(form.facts)),
    "scored_chat": lambda form, pieces: ScoredChatShape(
        form, pieces, ChatShape(form.identity, pieces, form.include_usage, read_format(form.facts))
    ),
    "text": CompletionShape,
    "anthropic": lambda form, pieces: MessagesShape(form),
    "ollama": OllamaShape,
    "response": ResponseShape,
}
