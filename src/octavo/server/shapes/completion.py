"""CompletionEncoder: answers of /v1/completions.

Owns: their choices, with an echoed prompt and its log-probabilities in front. Does not: know the chunks' frame.
A prompt's log-probabilities come with deltas of its first choice, before any of the answer; each of its choices shows
them. `facts`: "first_ids" (of each prompt), "num_echo" and "num_prompt_logprobs" (how many of the best are shown beside
each token of the prompt in `logprobs` and in `prompt_logprobs`), each only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.json import encode

from octavo.server.answer import Json, Pieces, last_usage, timings_json, usage_json
from octavo.server.generation import REASONS, Choice
from octavo.server.shapes.chunks import ChunkStream, ending
from octavo.server.shapes.framing import OPENAI
from octavo.server.shapes.text_logprobs import EchoedPrompt, LogprobColumns, add_logprobs, prompt_logprobs

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta
    from octavo.frontend.sessions import Scores
    from octavo.server.shapes.form import AnswerSpec


class CompletionEncoder:
    """Answers of /v1/completions; the form's `echoes` are the prompts' texts, put before each of the `n` choices."""

    framing = OPENAI

    def __init__(self, form: AnswerSpec, pieces: Pieces) -> None:
        self._pieces = pieces
        self._stream = ChunkStream("text_completion", form.identity, form.include_usage, form.facts, form.n)
        self._num_prompts, self._n = len(form.echoes), form.n
        self._facts: Mapping[str, Any] = form.facts
        self._texts = [echo for echo in form.echoes for _ in range(form.n)]
        self._begun: set[int] = set()
        self._offsets = [len(echo) for echo in self._texts]
        self._echoes = [self._echo(index) for index in range(len(self._texts))]

    def _echo(self, index: int) -> EchoedPrompt | None:
        num_top = self._facts.get("num_echo")
        if num_top is None:
            return None
        first_id: int = self._facts["first_ids"][index // self._n]
        return EchoedPrompt(self._texts[index], first_id, num_top, self._pieces)

    def whole(self, choices: Sequence[Choice]) -> Json:
        """A text_completion object."""
        usages = [last_usage(choice.deltas) for choice in choices]
        return {
            **self._stream.identity,
            "choices": [self._choice(index, choices) for index in range(len(choices))],
            "usage": usage_json(usages),
            "timings": timings_json(usages),
        }

    def _choice(self, index: int, choices: Sequence[Choice]) -> Json:
        choice, first = choices[index], choices[index - index % self._n]
        end = choice.deltas[-1]
        scores = [delta.prompt_logprobs for delta in first.deltas if delta.prompt_logprobs is not None]
        columns = LogprobColumns()
        echo = self._echo(index)
        if echo is not None:
            echo.add((entry for _, entries in scores for entry in entries), columns)
        add_logprobs(columns, choice.deltas, self._pieces, self._offsets[index])
        return {
            "index": index,
            "text": self._texts[index] + choice.text,
            "logprobs": columns.json() if columns.tokens else None,
            "finish_reason": REASONS[end.finish_reason] if end.finish_reason is not None else None,
            "stop_reason": end.stop_reason,
            **self._prompt_member(scores),
            **self._ids_members(index, choice.deltas),
        }

    def _ids_members(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        if "prompt_token_ids" not in self._facts:
            return {}
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return {"prompt_token_ids": self._facts["prompt_token_ids"][index // self._n], "token_ids": ids}

    def _prompt_member(self, scores: Sequence[Scores]) -> Json:
        num_top = self._facts.get("num_prompt_logprobs")
        if num_top is None:
            return {}
        found = [one for first, entries in scores for one in prompt_logprobs(first, entries, num_top, self._pieces)]
        return {"prompt_logprobs": found or [None]}

    def first(self) -> bytes:
        """Nothing: each choice begins by itself."""
        return b""

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Text, with the reason in the choice's last chunk."""
        if delta.prompt_logprobs is not None:
            choices = range(index, index + self._n)
            return b"".join(self._scores_chunk(choice, delta.prompt_logprobs) for choice in choices)
        self._stream.count(index, delta.token_ids)
        text, self._texts[index] = self._texts[index] + delta.text, ""
        columns, echo = LogprobColumns(), self._echoes[index]
        if echo is not None and not echo.has_begun:
            echo.add((), columns)
        self._offsets[index] = add_logprobs(columns, (delta,), self._pieces, self._offsets[index])
        logprobs = columns.json() if columns.tokens else None
        if not text and not logprobs and delta.finish_reason is None:
            return b""
        ids = self._stream.ids(index)
        if ids and index not in self._begun:
            self._begun.add(index)
            ids += b',"prompt_token_ids":%b' % encode(self._facts["prompt_token_ids"][index // self._n])
        choice = b'{"index":%d,"text":%b,"logprobs":%b,' % (index, encode(text), encode(logprobs))
        if delta.finish_reason is None:
            return self._stream.event(choice + b'"finish_reason":null%b}' % ids)
        return self._stream.event(choice + ending(delta, more=ids), self._stream.timings(delta, self._num_prompts))

    def _scores_chunk(self, index: int, scores: Scores) -> bytes:
        """Some of the prompt's log-probabilities; the echoed text goes with the first of them."""
        text, self._texts[index] = self._texts[index], ""
        columns, echo = LogprobColumns(), self._echoes[index]
        if echo is not None:
            echo.add(scores[1], columns)
        member = self._prompt_member([scores])
        if not columns.tokens and not member:
            return b""
        choice = {"index": index, "text": text, "logprobs": columns.json() if columns.tokens else None}
        return self._stream.event(encode({**choice, "finish_reason": None, **member}))

    def last(self) -> bytes:
        """The usage chunk."""
        return self._stream.usage_event() if self._stream.include_usage else b""
