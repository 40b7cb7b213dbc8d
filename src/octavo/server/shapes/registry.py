"""Which shape a form asks for.

Owns: the table of shapes. Does not: write any answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from octavo.server.answer import IdPieces
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
    "chat": ChatShape,
    "scored_chat": lambda form, pieces: ScoredChatShape(form, pieces, ChatShape(form, pieces)),
    "text": CompletionShape,
    "anthropic": lambda form, pieces: MessagesShape(form),
    "ollama": OllamaShape,
    "response": ResponseShape,
}


def shape_of(form: Form, pieces: Pieces) -> Shape:
    """A new shape, which has given nothing yet. The fact "shows_ids" has tokens shown as their ids."""
    return SHAPES[form.kind](form, IdPieces() if form.facts.get("shows_ids") else pieces)
