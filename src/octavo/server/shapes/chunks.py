"""ChunkStream: what the chunks of OpenAI's two kinds of completion share.

Owns: id, model, usage and the bytes around a choice. Does not: know what a choice holds.
Invariants: every chunk of a stream has the same id; finish_reason is null in all but a choice's last chunk.
Facts of a form: "num_prompt_tokens_each" (the usage so far is in every chunk), "prompt_token_ids" (ids are given too).
Chunks are joined from bytes made once per request; only the text and what follows from it is encoded per delta.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.json import encode

from octavo.server.answer import Json, timings_json, usage_json
from octavo.server.generation import REASONS

if TYPE_CHECKING:
    from octavo.core.request import FinishReason
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.server.shapes.shape import Identity

NO_FACTS: Mapping[str, Any] = {}


class ChunkStream:
    """What the chunks of one request share: id, model and the usage of the choices that ended."""

    def __init__(
        self, kind: str, identity: Identity, include_usage: bool, facts: Mapping[str, Any] = NO_FACTS, n: int = 1
    ) -> None:
        request_id, created, model = identity
        self.identity: Json = {"id": request_id, "object": kind, "created": created, "model": model}
        self.head = b"data: " + encode(self.identity)[:-1] + b',"choices":['
        self.include_usage = include_usage
        self.tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self.usages: list[Usage] = []
        self._n = n
        self._num_prompt_tokens: Sequence[int] | None = facts.get("num_prompt_tokens_each")
        self._num_tokens: Counter[int] = Counter()  # of each choice
        self._has_ids = "prompt_token_ids" in facts
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # of each choice, not given yet

    def count(self, index: int, token_ids: Sequence[int]) -> None:
        """Count tokens of a choice: its next chunk tells the usage so far and the ids, where they are asked for."""
        if self._has_ids:
            self._ids[index].extend(token_ids)
        if self._num_prompt_tokens is not None:
            self._num_tokens[index] += len(token_ids)
            number = min(index // self._n, len(self._num_prompt_tokens) - 1)  # all choices of a chat have one prompt
            prompt, made = self._num_prompt_tokens[number], self._num_tokens[index]
            usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            self.tail = b',"usage":%b}\n\n' % encode(usage)

    def ids(self, index: int) -> bytes:
        """The member of a choice with the ids counted since its chunk before, where ids are given."""
        return b',"token_ids":%b' % encode(self._ids.pop(index, [])) if self._has_ids else b""

    def event(self, choice: bytes, extra: bytes = b"") -> bytes:
        """One chunk with one choice; `extra` are further members of the object, each with its comma."""
        return b"".join((self.head, choice, b"]", extra, self.tail))

    def timings(self, delta: TextDelta, num_prompts: int) -> bytes:
        """Take a choice's last delta; the member with the timings if it ends the answer and no usage chunk has them."""
        if delta.usage is not None:
            self.usages.append(delta.usage)
        if delta.usage is None or self.include_usage or len(self.usages) < num_prompts:
            return b""
        return b',"timings":' + encode(timings_json(self.usages))

    def usage_event(self, reasoning_share: float | None = None) -> bytes:
        """The chunk without choices that carries the usage."""
        usage = encode(usage_json(self.usages, reasoning_share))
        return b"".join((self.head, b'],"usage":', usage, b',"timings":', encode(timings_json(self.usages)), b"}\n\n"))


def ending(delta: TextDelta, word: str | None = None, more: bytes = b"") -> bytes:
    """The last members of a choice that ends, and its closing brace; `word` is another one for the reason."""
    reason: FinishReason | None = delta.finish_reason
    assert reason is not None
    end = encode(word or REASONS[reason]), encode(delta.stop_reason), more
    return b'"finish_reason":%b,"stop_reason":%b%b}' % end
