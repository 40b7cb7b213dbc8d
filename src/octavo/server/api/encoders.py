"""The encoders of answers, by the kind in an AnswerSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.server.api.anthropic.answers import MessagesEncoder
from octavo.server.api.completions.answers import ChatEncoder, CompletionEncoder
from octavo.server.api.ollama.answers import OllamaEncoder
from octavo.server.api.responses.answers import ResponseEncoder
from octavo.server.encoding import AnswerEncoder, AnswerSpec, Pieces

ENCODERS: Mapping[str, Callable[[AnswerSpec, Pieces], AnswerEncoder]] = {
    "chat": ChatEncoder,
    "text": CompletionEncoder,
    "anthropic": MessagesEncoder,
    "ollama": OllamaEncoder,
    "response": ResponseEncoder,
}
