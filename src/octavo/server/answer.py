"""The parts that chat and text answers share: usage, timings, log-probabilities, and how text is split into parts.

Owns: their shape. Does not: know whether they travel whole or in a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.server.bodies.structure import given_structures
from octavo.text.answer_format import AnswerFormat

if TYPE_CHECKING:
    from octavo.core.plan import TokenLogprobs
    from octavo.frontend.sessions import TextDelta, Usage

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


class Pieces(Protocol):
    """What is asked of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...


def usage_json(usages: Iterable[Usage | None], reasoning_share: float | None = None) -> Json:
    """OpenAI's usage object, summed over the prompts; the choices of one prompt share a usage.

    `reasoning_share` is the reasoning's part of the text, where an answer may have reasoning: the tokens of a part are
    not known alone.
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


def timings_json(usages: Iterable[Usage | None]) -> Json:
    """Seconds that the request spent in each phase (the slowest prompt's), which add up to the total, and its rates.

    While it was preempted, a request neither prefilled nor decoded.
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
    out_before = out_after = 0.0  # seconds that it was out of the batch, before its first token and after it
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


def last_usage(deltas: Sequence[TextDelta]) -> Usage | None:
    """The usage that a choice's last delta carries, if it was its prompt's last."""
    return deltas[-1].usage if deltas else None


class IdPieces:
    """Pieces that show a token by its id, as return_tokens_as_token_ids asks for."""

    def token_bytes(self, token_id: int) -> bytes:
        """The id in vLLM's spelling."""
        return b"token_id:%d" % token_id


def chat_logprobs(deltas: Iterable[TextDelta], pieces: Pieces) -> Json | None:
    """`logprobs` of a chat choice or chunk; None when there are none."""
    entries = entries_of(deltas)
    if not entries:
        return None
    return {"content": [_chat_entry(entry, pieces) for entry in entries], "refusal": None}


def entries_of(deltas: Iterable[TextDelta]) -> list[TokenLogprobs]:
    """The log-probabilities of deltas, one entry per token."""
    return [entry for delta in deltas for entry in delta.logprobs or () if entry is not None]


def _chat_entry(entry: TokenLogprobs, pieces: Pieces) -> Json:
    tops = [_one(t, p, pieces) for t, p in zip(entry.top_ids, entry.top_logprobs, strict=True)]
    return {**_one(entry.token_id, entry.logprob, pieces), "top_logprobs": tops}


def _one(token_id: int, logprob: float, pieces: Pieces) -> Json:
    raw = pieces.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, LOWEST_LOGPROB)


if TYPE_CHECKING:
    from octavo.server.bodies.chat import ChatBody
    from octavo.server.bodies.tools import Tool
    from octavo.text.dialect import Dialect, Tags
    from octavo.text.tokenizer import Tokenizer

FORMAT = "format"  # of a form's facts
FORCED_AS = {"qwen3_coder": "hermes"}  # under a grammar: its values have no form that a schema could be held to
TAIL_IDS = 32  # of a prompt: tags and blank space at its end are spelled with fewer


def format_of(dialect: Dialect, body: ChatBody, prompt_end: str) -> AnswerFormat | None:
    """How the answer to a body is told apart, None when all of it is content; `prompt_end` is the prompt's end."""
    tools = body.usable_tools if body.tools else []
    calls = dialect.calls if tools else None
    reasoning, starts_inside = reasoning_of(dialect, prompt_end)
    if calls is None:
        return None if reasoning is None else AnswerFormat(reasoning, starts_inside)
    return AnswerFormat(
        reasoning=reasoning,
        starts_inside=starts_inside,
        calls=FORCED_AS.get(calls, calls) if body.forced or given_structures(body) else calls,
        forced=body.forced,
        names=tuple(tool.function.name for tool in tools),
        texts=tuple(text for tool in tools for text in _texts(tool)) if calls == "qwen3_coder" else (),
        is_single=body.parallel_tool_calls is False,
    )


def reasoning_of(dialect: Dialect, prompt_end: str) -> tuple[Tags | None, bool]:
    """The tags to be looked for, and whether the prompt has opened them."""
    tags, end = dialect.reasoning, prompt_end.rstrip()
    if tags is None or end.endswith(tags[1]):  # it is over before the answer begins
        return None, False
    return tags, end.endswith(tags[0])


def shown_ids(dialect: Dialect, has_tools: bool, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Special tokens that are shown all the same: those that tell the parts of an answer apart."""
    ids = [tokenizer.backend.token_to_id(marker) for marker in dialect.markers(has_tools)]
    return tuple(sorted({token_id for token_id in ids if token_id in tokenizer.special_ids}))


def format_fact(answer_format: AnswerFormat | None) -> dict[str, object]:
    """The format among a form's facts."""
    return {} if answer_format is None else {FORMAT: msgspec.to_builtins(answer_format)}


def read_format(facts: Mapping[str, Any]) -> AnswerFormat | None:
    """The format that a form's facts hold."""
    return None if facts.get(FORMAT) is None else msgspec.convert(facts[FORMAT], AnswerFormat)


def _texts(tool: Tool) -> list[str]:
    """The arguments that are strings, by their schema."""
    properties = json.loads(tool.function.parameters).get("properties")
    if not isinstance(properties, dict):
        return []
    name = tool.function.name
    return [f"{name}.{key}" for key, schema in properties.items() if isinstance(schema, dict) and _is_text(schema)]


def _is_text(schema: Mapping[str, object]) -> bool:
    if "enum" in schema and isinstance(schema["enum"], list):
        return all(isinstance(value, str) for value in schema["enum"])
    return schema.get("type") == "string"
