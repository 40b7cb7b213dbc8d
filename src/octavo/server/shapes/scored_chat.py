"""ScoredChatEncoder: answers of /v1/chat/completions with log-probabilities of the prompt, as vLLM has them.

Owns: the member `prompt_logprobs`, of the answer or of chunks without choices. Does not: shape anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.json import encode

from octavo.server.answer import Json, Pieces
from octavo.server.shapes.chunks import ChunkStream
from octavo.server.shapes.text_logprobs import prompt_logprobs

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta
    from octavo.frontend.sessions import Scores
    from octavo.server.generation import Choice
    from octavo.server.shapes.form import AnswerSpec
    from octavo.server.shapes.framing import StreamFormat
    from octavo.server.shapes.shape import AnswerEncoder


class ScoredChatEncoder:
    """A chat's shape with more around it. The form's facts have "num_prompt_logprobs"."""

    def __init__(self, form: AnswerSpec, pieces: Pieces, chat: AnswerEncoder) -> None:
        self._chat = chat
        self._pieces = pieces
        self._num_top: int = form.facts["num_prompt_logprobs"]
        self._head = ChunkStream("chat.completion.chunk", form.identity, False).head

    @property
    def framing(self) -> StreamFormat:
        """The chat's."""
        return self._chat.framing

    def whole(self, choices: Sequence[Choice]) -> Json:
        """A chat.completion object."""
        scores = [delta.prompt_logprobs for delta in choices[0].deltas if delta.prompt_logprobs is not None]
        found = [one for part in scores for one in self._list(part)]
        return {**self._chat.whole(choices), "prompt_logprobs": found or [None]}

    def first(self) -> bytes:
        """The chat's."""
        return self._chat.first()

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Some of the prompt's log-probabilities, or what the chat makes of it."""
        if delta.prompt_logprobs is None:
            return self._chat.chunk(index, delta)
        return self._head + b'],"prompt_logprobs":' + encode(self._list(delta.prompt_logprobs)) + b"}\n\n"

    def last(self) -> bytes:
        """The chat's."""
        return self._chat.last()

    def _list(self, scores: Scores) -> list[Json | None]:
        first, entries = scores
        return prompt_logprobs(first, entries, self._num_top, self._pieces)
