"""Answers of /v1/chat/completions and /v1/completions, whole and as chunks.

Owns: both encoders; the JSON of usage and of timings, which other APIs use too.
Does not: separate calls and reasoning from text (AnswerReader does).
Invariants: every chunk of a stream has the same id. finish_reason is null in all but a choice's last chunk. A delta
makes at most one chunk, besides the chunks that begin and end a choice.
Facts of both specs: "num_prompt_tokens_each" (each chunk has the usage so far), "prompt_token_ids" (ids are sent),
"shows_ids" (tokens are shown as ids).
Chunks are joined from bytes that are encoded once per request; only the delta's own data is encoded per delta.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, convert
from msgspec.json import encode

from octavo.core.request import FinishReason
from octavo.server.encoding import (
    REASONS,
    AnswerSpec,
    Choice,
    IdPieces,
    Json,
    Pieces,
    StreamFormat,
    chat_logprobs,
    encodes,
    entries_of,
    finite,
)
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.dialect import AnswerReader

if TYPE_CHECKING:
    from octavo.core.plan import TokenLogprobs
    from octavo.frontend.outputs import TextDelta, Usage
    from octavo.frontend.sessions import Scores
    from octavo.server.http.errors import ApiError


def _error_event(error: ApiError) -> bytes:
    return b"data: " + encode(error.body()) + b"\n\n"


OPENAI = StreamFormat("text/event-stream", b"data: [DONE]\n\n", b": keep-alive\n\n", _error_event)


class ChunkStream:
    """The shared state of one request's chunks: id, model, and the usage of the choices that have ended."""

    def __init__(self, kind: str, spec: AnswerSpec, pieces: Pieces) -> None:
        request_id, created, model = spec.identity
        self.identity: Json = {"id": request_id, "object": kind, "created": created, "model": model}
        self.head = b"data: " + encode(self.identity)[:-1] + b',"choices":['
        self.include_usage = spec.include_usage
        self.pieces: Pieces = IdPieces() if spec.facts.get("shows_ids") else pieces
        self.has_ids = "prompt_token_ids" in spec.facts
        self._tail = b',"usage":null}\n\n' if spec.include_usage else b"}\n\n"
        self._usages: list[Usage] = []
        self._n = spec.n
        self._num_prompt_tokens: Sequence[int] | None = spec.facts.get("num_prompt_tokens_each")
        self.counts_tokens = self.has_ids or self._num_prompt_tokens is not None  # whether `count` must be called
        self._num_tokens: Counter[int] = Counter()  # by choice
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # ids not sent yet, by choice

    def chunk(self, choice: bytes, extra: bytes = b"") -> bytes:
        """Return a chunk with one choice. `extra` is further JSON members of the chunk, each after a comma."""
        return b"".join((self.head, choice, b"]", extra, self._tail))

    def ending(self, delta: TextDelta, word: str, more: bytes, num_prompts: int) -> tuple[bytes, bytes]:
        """Return a choice's last JSON members, and the timings unless a usage chunk will have them."""
        end = b'"finish_reason":%b,"stop_reason":%b%b}' % (encode(word), encode(delta.stop_reason), more)
        if delta.usage is not None:
            self._usages.append(delta.usage)
        if delta.usage is None or self.include_usage or len(self._usages) < num_prompts:
            return end, b""
        return end, b',"timings":' + encode(timings_json(self._usages))

    def usage_chunk(self, reasoning_share: float | None = None) -> bytes:
        """Return the chunk without choices that carries the usage."""
        usage = encode(usage_json(self._usages, reasoning_share))
        return b"".join((self.head, b'],"usage":', usage, b',"timings":', encode(timings_json(self._usages)), b"}\n\n"))

    def count(self, index: int, token_ids: Sequence[int]) -> None:
        """Count a choice's tokens: for the ids in its next chunk, and for the usage so far."""
        if self.has_ids:
            self._ids[index].extend(token_ids)
        if self._num_prompt_tokens is not None:
            self._num_tokens[index] += len(token_ids)
            number = min(index // self._n, len(self._num_prompt_tokens) - 1)  # all choices of a chat share a prompt
            prompt, made = self._num_prompt_tokens[number], self._num_tokens[index]
            usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            self._tail = b',"usage":%b}\n\n' % encode(usage)

    def take_ids(self, index: int) -> bytes:
        """Return the JSON member with the ids that were counted since the choice's last chunk."""
        return b',"token_ids":%b' % encode(self._ids.pop(index, []))


@encodes("chat")
class ChatEncoder:
    """The encoder of /v1/chat/completions.

    Facts: "format" (an AnswerFormat; without one, all text is content); "num_prompt_logprobs" (the number of best
    tokens shown for each prompt token, in separate chunks).
    """

    stream_format = OPENAI
    head = b""

    def __init__(self, spec: AnswerSpec, pieces: Pieces) -> None:
        self._stream = ChunkStream("chat.completion.chunk", spec, pieces)
        self._format = convert(spec.facts.get("format"), AnswerFormat | None)
        calls = None if self._format is None or self._format.forced == "named" else self._format.calls
        self._ends_by_calls = calls is not None
        ids = spec.facts.get("prompt_token_ids")
        self._prompt_member: Json = {} if ids is None else {"prompt_token_ids": ids[0]}
        self._num_prompt_logprobs: int | None = spec.facts.get("num_prompt_logprobs")
        self._readers: dict[int, AnswerReader] = {}

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return a chat.completion object."""
        usages = [choice.usage for choice in choices]
        made = {
            **self._stream.identity,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usages, self._reasoning_share()),
            "timings": timings_json(usages),
            **self._prompt_member,
        }
        if self._num_prompt_logprobs is not None:
            found = [one for delta in choices[0].deltas for one in self._scores(delta)]
            made["prompt_logprobs"] = found or [None]
        return made

    def _choice(self, index: int, choice: Choice) -> Json:
        end = choice.deltas[-1]
        reader = self._readers[index] = AnswerReader(self._format, f"{self._stream.identity['id']}:{index}")
        parts = [*reader.push(choice.text), *reader.finish()]
        ids = [token_id for delta in choice.deltas for token_id in delta.token_ids]
        return {
            "index": index,
            "message": {"role": "assistant", **_message(parts)},
            "logprobs": chat_logprobs(choice.deltas, self._stream.pieces),
            "finish_reason": self._word(reader, end.finish_reason) if end.finish_reason is not None else None,
            "stop_reason": end.stop_reason,
            **({"token_ids": ids} if self._prompt_member else {}),
        }

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return a delta's chunks: the role; text, reasoning and calls; at the end the finish reason and held text."""
        stream = self._stream
        if delta.prompt_logprobs is not None:
            return stream.head + b'],"prompt_logprobs":' + encode(self._scores(delta)) + b"}\n\n"
        events = [] if index in self._readers else [self._begin(index)]
        reader = self._readers[index]
        if stream.counts_tokens:
            stream.count(index, delta.token_ids)
        logprobs = chat_logprobs((delta,), stream.pieces) if delta.logprobs else None
        fields = b'"content":%b' % encode(delta.text) if delta.text or logprobs else b""
        held = b""
        if self._format is not None:
            parts = reader.push(delta.text)
            rest = reader.finish() if delta.finish_reason is not None else []
            if parts or logprobs:
                parts, rest = parts + rest, []
            fields, held = _fields(parts), _fields(rest) if rest else b""
        if fields or logprobs:
            event = (index, fields, encode(logprobs), stream.take_ids(index) if stream.has_ids else b"")
            events.append(stream.chunk(b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null%b}' % event))
        if delta.finish_reason is not None:
            ids = stream.take_ids(index) if stream.has_ids else b""
            end, timings = stream.ending(delta, self._word(reader, delta.finish_reason), ids, num_prompts=1)
            events.append(stream.chunk(b'{"index":%d,"delta":{%b},"logprobs":null,%b' % (index, held, end), timings))
        return b"".join(events)

    def last(self) -> bytes:
        """Return the usage chunk; b"" if it was not requested."""
        return self._stream.usage_chunk(self._reasoning_share()) if self._stream.include_usage else b""

    def _begin(self, index: int) -> bytes:
        """Return a choice's first chunk, with its role. The answer's first chunk has the prompt's ids, if requested."""
        prompt = b"" if self._readers else encode(self._prompt_member)[1:-1]
        self._readers[index] = AnswerReader(self._format, f"{self._stream.identity['id']}:{index}")
        if self._stream.counts_tokens:
            self._stream.count(index, ())
        begin = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._stream.chunk(begin % index, b"," + prompt if prompt else b"")

    def _word(self, reader: AnswerReader, reason: FinishReason) -> str:
        """Return OpenAI's finish reason: "tool_calls" if there are calls, unless the client named the function."""
        is_call = self._ends_by_calls and reason is FinishReason.STOP and reader.has_calls
        return "tool_calls" if is_call else REASONS[reason]

    def _reasoning_share(self) -> float:
        readers = self._readers.values()
        num_characters = sum(reader.num_characters for reader in readers)
        return sum(reader.num_reasoning_characters for reader in readers) / max(1, num_characters)

    def _scores(self, delta: TextDelta) -> list[Json | None]:
        if delta.prompt_logprobs is None or self._num_prompt_logprobs is None:
            return []
        first, entries = delta.prompt_logprobs
        return prompt_logprobs(first, entries, self._num_prompt_logprobs, self._stream.pieces)


def _message(parts: Sequence[Part]) -> Json:
    """Return the fields of a message, without its role."""
    text = "".join(part.text for part in parts if isinstance(part, Text))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [{"id": call["id"], "type": call["type"], "function": call["function"]} for call in _calls(parts)]
    message: Json = {"content": text if text or not calls else None, "refusal": None}
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(parts: Sequence[Part]) -> list[Json]:
    """Return one object for each call in the parts. A call that began in an earlier delta has only its arguments."""
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    return list(calls.values())


def _fields(parts: Sequence[Part]) -> bytes:
    """Return the JSON members of a delta, without braces."""
    if not parts:
        return b""
    delta: Json = {}
    has_calls = False
    for part in parts:
        if isinstance(part, Text):
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            thought = delta.get("reasoning", "") + part.text
            delta |= {"reasoning": thought, "reasoning_content": thought}
        else:
            has_calls = True
    if has_calls:
        delta["tool_calls"] = _calls(parts)
    return encode(delta)[1:-1]


@encodes("text")
class CompletionEncoder:
    """The encoder of /v1/completions. The spec's `echoes` are the prompts' texts, put before each of the `n` choices.

    A prompt's log-probabilities arrive with deltas of its first choice, before the answer; all its choices show them.
    Facts, each only if requested: "first_ids" (each prompt's first id), "num_echo" and "num_prompt_logprobs" (the
    number of best tokens per prompt token, in `logprobs` and in `prompt_logprobs`).
    """

    stream_format = OPENAI
    head = b""

    def __init__(self, spec: AnswerSpec, pieces: Pieces) -> None:
        self._stream = ChunkStream("text_completion", spec, pieces)
        self._pieces = self._stream.pieces
        self._num_prompts, self._n = len(spec.echoes), spec.n
        self._facts: Mapping[str, Any] = spec.facts
        self._texts = [echo for echo in spec.echoes for _ in range(spec.n)]
        self._started: set[int] = set()
        self._offsets = [len(echo) for echo in self._texts]
        self._echoes = [self._echo(index) for index in range(len(self._texts))]

    def _echo(self, index: int) -> EchoedPrompt | None:
        num_top = self._facts.get("num_echo")
        if num_top is None:
            return None
        first_id: int = self._facts["first_ids"][index // self._n]
        return EchoedPrompt(self._texts[index], first_id, num_top, self._pieces)

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return a text_completion object."""
        usages = [choice.usage for choice in choices]
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
            "logprobs": columns if columns.tokens else None,
            "finish_reason": REASONS[end.finish_reason] if end.finish_reason is not None else None,
            "stop_reason": end.stop_reason,
            **self._prompt_member(scores),
            **self._ids_members(index, choice.deltas),
        }

    def _ids_members(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        if not self._stream.has_ids:
            return {}
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return {"prompt_token_ids": self._facts["prompt_token_ids"][index // self._n], "token_ids": ids}

    def _prompt_member(self, scores: Sequence[Scores]) -> Json:
        num_top = self._facts.get("num_prompt_logprobs")
        if num_top is None:
            return {}
        found = [one for first, entries in scores for one in prompt_logprobs(first, entries, num_top, self._pieces)]
        return {"prompt_logprobs": found or [None]}

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return a chunk with text; the choice's last chunk has the finish reason."""
        if delta.prompt_logprobs is not None:
            choices = range(index, index + self._n)
            return b"".join(self._scores_chunk(choice, delta.prompt_logprobs) for choice in choices)
        stream = self._stream
        if stream.counts_tokens:
            stream.count(index, delta.token_ids)
        text, self._texts[index] = self._texts[index] + delta.text, ""
        columns, echo = LogprobColumns(), self._echoes[index]
        if echo is not None and not echo.has_started:
            echo.add((), columns)
        self._offsets[index] = add_logprobs(columns, (delta,), self._pieces, self._offsets[index])
        logprobs = columns if columns.tokens else None
        if not text and not logprobs and delta.finish_reason is None:
            return b""
        ids = stream.take_ids(index) if stream.has_ids else b""
        if ids and index not in self._started:
            self._started.add(index)
            ids += b',"prompt_token_ids":%b' % encode(self._facts["prompt_token_ids"][index // self._n])
        begin = b'{"index":%d,"text":%b,"logprobs":%b,' % (index, encode(text), encode(logprobs))
        if delta.finish_reason is None:
            return stream.chunk(begin + b'"finish_reason":null%b}' % ids)
        end, timings = stream.ending(delta, REASONS[delta.finish_reason], ids, self._num_prompts)
        return stream.chunk(begin + end, timings)

    def _scores_chunk(self, index: int, scores: Scores) -> bytes:
        """Return a chunk with more of the prompt's log-probabilities. The first such chunk has the echoed text."""
        text, self._texts[index] = self._texts[index], ""
        columns, echo = LogprobColumns(), self._echoes[index]
        if echo is not None:
            echo.add(scores[1], columns)
        member = self._prompt_member([scores])
        if not columns.tokens and not member:
            return b""
        choice = {"index": index, "text": text, "logprobs": columns if columns.tokens else None}
        return self._stream.chunk(encode({**choice, "finish_reason": None, **member}))

    def last(self) -> bytes:
        """Return the usage chunk; b"" if it was not requested."""
        return self._stream.usage_chunk() if self._stream.include_usage else b""


def timings_json(usages: Iterable[Usage | None]) -> Json:
    """Return the slowest prompt's seconds in each phase, which add up to its total, and the token rates of all prompts.

    Seconds in preemption count as neither prefill nor decode.
    """
    last: Usage | None = None
    computed = decoded = 0
    for usage in usages:
        if usage is not None:
            computed += usage.prompt_tokens - usage.cached_tokens
            decoded += max(0, usage.completion_tokens - 1)
            if last is None or usage.e2e_s > last.e2e_s:
                last = usage
    if last is None:
        return {}
    out_before = out_after = 0.0  # seconds of preemption, before the first token and after it
    for out, back in last.preempted:
        out_before += max(0.0, min(back, last.ttft_s) - max(out, 0.0))
        out_after += max(0.0, min(back, last.e2e_s) - max(out, last.ttft_s))
    prefill_s = max(0.0, last.ttft_s - last.queue_s - out_before)
    decode_s = max(0.0, last.e2e_s - last.ttft_s - out_after)
    return {
        "queue_s": round(last.queue_s, 6),
        "prefill_s": round(prefill_s, 6),
        "decode_s": round(decode_s, 6),
        "preempted_s": round(out_before + out_after, 6),
        "total_s": round(last.e2e_s, 6),
        "prompt_tokens_per_s": round(computed / prefill_s, 2) if prefill_s > 0 else None,
        "tokens_per_s": round(decoded / decode_s, 2) if decode_s > 0 and decoded else None,
    }


def usage_json(usages: Iterable[Usage | None], reasoning_share: float | None = None) -> Json:
    """Return OpenAI's usage object, summed over the prompts. All choices of a prompt share one usage.

    `reasoning_share` is the reasoning's share of the text, if an answer may have reasoning. The reasoning's tokens are
    estimated from it, since tokens are not counted by part.
    """
    known = [usage for usage in usages if usage is not None]
    prompt = sum(usage.prompt_tokens for usage in known)
    completion = sum(usage.completion_tokens for usage in known)
    counts: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
    }
    if reasoning_share is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": round(reasoning_share * completion)}
    return counts


class LogprobColumns(Struct):
    """OpenAI's `logprobs` of a text completion: one list per field, with an entry per token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token_id: int, entry: TokenLogprobs | None, offset: int, pieces: Pieces) -> None:
        """Add a token. A prompt's first token has no entry."""
        self.tokens.append(token_text(token_id, pieces))
        self.token_logprobs.append(None if entry is None else finite(entry.logprob))
        self.top_logprobs.append(None if entry is None else top_logprobs(entry, pieces))
        self.text_offset.append(offset)


class EchoedPrompt:
    """One prompt's part of `logprobs`, added in pieces. Its first token, `first_id`, has no log-probability."""

    def __init__(self, text: str, first_id: int, num_top: int, pieces: Pieces) -> None:
        self._text = text
        self._first_id: int | None = first_id
        self._num_top = num_top
        self._pieces = pieces
        self._offset = 0

    @property
    def has_started(self) -> bool:
        """True if the first token was added."""
        return self._first_id is None

    def add(self, entries: Iterable[TokenLogprobs], columns: LogprobColumns) -> None:
        """Add the next tokens of the prompt. The first call also adds `first_id`."""
        if self._first_id is not None:
            columns.add(self._first_id, None, 0, self._pieces)
            self._pass(self._first_id)
            self._first_id = None
        for entry in entries:
            columns.add(entry.token_id, shortened(entry, self._num_top), self._offset, self._pieces)
            self._pass(entry.token_id)

    def _pass(self, token_id: int) -> None:
        """Move the offset past a token. A token that the text does not show, such as BOS, has length 0."""
        raw = self._pieces.token_bytes(token_id)
        shown = raw.decode(errors="replace")
        if "\ufffd" in shown or self._text.startswith(shown, self._offset):
            self._offset += num_characters(raw)


def prompt_logprobs(first: int, entries: Sequence[TokenLogprobs], num_top: int, pieces: Pieces) -> list[Json | None]:
    """Return vLLM's `prompt_logprobs` from position `first`: id -> log-probability, rank, text; null for position 0."""
    found: list[Json | None] = [None] if first == 1 else []
    for entry in entries:
        entry = shortened(entry, num_top)
        shown = [(entry.token_id, entry.logprob, entry.rank)]
        ranked = zip(entry.top_ids, entry.top_logprobs, range(1, num_top + 1), strict=False)
        shown += [one for one in ranked if one[0] != entry.token_id]
        found.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_text(token_id, pieces),
                }
                for token_id, logprob, rank in shown
            }
        )
    return found


def top_logprobs(entry: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """Return text -> log-probability for the best tokens, best first, and for the token itself."""
    own = token_text(entry.token_id, pieces)
    tops: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        text = token_text(token_id, pieces)
        is_taken = text in tops or (text == own and token_id != entry.token_id)
        tops[f"token_id:{token_id}" if is_taken else text] = finite(logprob)
    tops.setdefault(own, finite(entry.logprob))
    return tops


def shortened(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """Return the entry with only its `num_top` best tokens."""
    if len(entry.top_ids) <= num_top:
        return entry
    kind = type(entry)
    return kind(entry.token_id, entry.logprob, entry.rank, entry.top_ids[:num_top], entry.top_logprobs[:num_top])


def token_text(token_id: int, pieces: Pieces) -> str:
    """Return the text of one token, decoded alone."""
    return pieces.token_bytes(token_id).decode(errors="replace")


def num_characters(raw: bytes) -> int:
    """Return the number of characters that begin in these bytes. A character in several tokens counts in its first."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def add_logprobs(columns: LogprobColumns, deltas: Iterable[TextDelta], pieces: Pieces, offset: int) -> int:
    """Add the deltas' tokens to the columns, starting `offset` characters into the text; return the end's offset."""
    for entry in entries_of(deltas):
        columns.add(entry.token_id, entry, offset, pieces)
        offset += num_characters(pieces.token_bytes(entry.token_id))
    return offset
