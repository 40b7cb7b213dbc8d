"""Which shape a form asks for.

Owns: the table of shapes. Does not: write any answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from octavo.server.answer_formats import read_format
from octavo.server.shapes.anthropic import MessagesShape
from octavo.server.shapes.chat import ChatShape
from octavo.server.shapes.completion import CompletionShape
from octavo.server.shapes.ollama import OllamaShape
from octavo.server.shapes.responses import ResponseShape
from octavo.server.shapes.scored_chat import ScoredChatShape

if TYPE_CHECKING:
    from octavo.server.answer import Pieces
    from octavo.server.shapes.form import Form
    from octavo.server.shapes.shape import Shape

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


def shape_of(form: Form, pieces: Pieces) -> Shape:
    """A new shape, which has given nothing yet."""
    return SHAPES[form.kind](form, pieces)
