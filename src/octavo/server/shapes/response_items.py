"""ItemWriter: the output items of one response, and the events that tell of them as they come.

Owns: items, their ids, and the order of an item's events. Does not: number events or know the response around them.
Invariant: what the events of an item say, put together, is the item in the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Raw
from msgspec.json import encode

from octavo.text.answer_parts import CallArguments, CallBegin, Part, Reasoning, Text

if TYPE_CHECKING:
    from octavo.server.encoding import Json

Event = tuple[str, "Json"]  # its type, and what it says beside type and sequence number
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class ItemWriter:
    """Writes items from parts. `seed` begins the ids of this answer's items, behind what tells their kind."""

    def __init__(self, seed: str) -> None:
        self.output: list[Json] = []
        self._seed = seed
        self._texts: list[str] = []  # of the item that is open
        self._is_open = False
        self._logprobs: list[Raw] = []  # of tokens whose text has not come
        self._said: list[Raw] = []  # log-probabilities of the open message
        self._place = b""  # of the open message's text, as members of its events

    def add_text(self, text: str) -> bytes:
        """Take more text of the open message; give the members of its event that tell where it belongs.

        b"", and nothing is taken, where it would bring other events or log-probabilities.
        """
        if self._place and not self._logprobs:
            self._texts.append(text)
            return self._place
        return b""

    def push(self, parts: Sequence[Part], logprobs: Sequence[Raw]) -> Iterator[Event]:
        """Take the next parts; `logprobs` are those of the tokens that brought them."""
        self._logprobs += logprobs
        for part in parts:
            if isinstance(part, Text):
                yield from self._ensure("message")
                yield self._text_delta(part.text)
            elif isinstance(part, Reasoning):
                yield from self._ensure("reasoning")
                self._logprobs.clear()
                yield self._delta("response.reasoning_text.delta", part.text, content_index=0)
            elif isinstance(part, CallBegin):
                yield from self.close("completed")
                yield from self._open("function_call", call_id=part.call_id, name=part.name)
            elif isinstance(part, CallArguments):
                self._logprobs.clear()
                yield self._delta("response.function_call_arguments.delta", part.text)

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """The answer has ended; an answer without any item gets an empty message."""
        if not self.output:
            yield from self._ensure("message")
        yield from self.close("incomplete" if is_cut else "completed")

    def close(self, status: str) -> Iterator[Event]:
        """End the item that is open, if there is one."""
        if not self._is_open:
            return
        self._is_open, self._place = False, b""
        item, text = self.output[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
        elif item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", text=text, content_index=0)
            yield from self._close_part({"type": "reasoning_text", "text": text})
        else:
            if self._logprobs:
                yield self._text_delta("")
            yield self._event("response.output_text.done", text=text, logprobs=self._said, content_index=0)
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._said}
            yield from self._close_part(part)
        yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": item}

    def _close_part(self, part: Json) -> Iterator[Event]:
        self.output[-1]["content"] = [part]
        yield self._event("response.content_part.done", part=part, content_index=0)

    def _ensure(self, kind: str) -> Iterator[Event]:
        """Have an item of this kind open."""
        if self._is_open and self.output[-1]["type"] == kind:
            return
        yield from self.close("completed")
        yield from self._open(kind)

    def _open(self, kind: str, **facts: str) -> Iterator[Event]:
        self._is_open, self._texts, self._said = True, [], []
        item: Json = {"id": f"{_PREFIXES[kind]}{self._seed}{len(self.output):02x}", "type": kind, **facts}
        item["status"] = "in_progress"
        if kind == "function_call":
            item["arguments"] = ""
        else:
            item |= {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)}
        if kind == "reasoning":
            yield self._event("response.content_part.added", part={"type": "reasoning_text", "text": ""},
                              content_index=0)  # fmt: skip
        elif kind == "message":
            self._place = encode(self._event("", content_index=0)[1])[1:-1]
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", part=part, content_index=0)

    def _text_delta(self, text: str) -> Event:
        logprobs, self._logprobs = self._logprobs, []
        self._said += logprobs
        return self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)

    def _delta(self, kind: str, text: str, **facts: object) -> Event:
        self._texts.append(text)
        return self._event(kind, delta=text, **facts)

    def _event(self, kind: str, **facts: object) -> Event:
        """An event of the last item."""
        return kind, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **facts}
