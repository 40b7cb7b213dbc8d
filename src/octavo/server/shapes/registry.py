"""Which shape a form asks for.

Owns: the table of shapes. Does not: write any answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from octavo.server.answer import IdPieces
from octavo.server.shapes.anthropic import MessagesEncoder
from octavo.server.shapes.chat import ChatEncoder
from octavo.server.shapes.completion import CompletionEncoder
from octavo.server.shapes.ollama import OllamaEncoder
from octavo.server.shapes.responses import ResponseEncoder
from octavo.server.shapes.scored_chat import ScoredChatEncoder

if TYPE_CHECKING:
    from octavo.server.answer import Pieces
    from octavo.server.shapes.form import AnswerSpec
    from octavo.server.shapes.shape import AnswerEncoder

SHAPES: Mapping[str, Callable[[AnswerSpec, Pieces], AnswerEncoder]] = {
    "chat": ChatEncoder,
    "scored_chat": lambda form, pieces: ScoredChatEncoder(form, pieces, ChatEncoder(form, pieces)),
    "text": CompletionEncoder,
    "anthropic": lambda form, pieces: MessagesEncoder(form),
    "ollama": OllamaEncoder,
    "response": ResponseEncoder,
}


def shape_of(form: AnswerSpec, pieces: Pieces) -> AnswerEncoder:
    """A new shape, which has given nothing yet. The fact "shows_ids" has tokens shown as their ids."""
    return SHAPES[form.kind](form, IdPieces() if form.facts.get("shows_ids") else pieces)
