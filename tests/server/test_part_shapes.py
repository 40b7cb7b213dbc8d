"""Anthropic's and Ollama's shapes: what a stream holds adds up to the whole answer, however the text was cut."""

import json
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.request import FinishReason
from octavo.frontend.outputs import TextDelta, Usage
from octavo.server.api.anthropic.endpoints import SIGNATURE
from octavo.server.encoding import ENCODERS, AnswerSpec, Choice
from octavo.text.answer_format import AnswerFormat
from tests.server.fakes import make_text
from tests.server.test_anthropic import stream_events

TOKENIZER = make_text().tokenizer
USAGE = Usage(30, 12, 8, 0.001, 0.0025, 0.0100000004)
FORMAT = AnswerFormat(reasoning=("<think>", "</think>"), calls="hermes", names=("f", "g"))
IDENTITY = ("msg-1", 1_700_000_000, "tiny")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é{}\\"", "y": [1, 2]}}\n</tool_call>'
ANSWERS = [
    "Plain text.",
    "",
    "<think>One two.</think>\n\nThree.",
    "<think>never closed",
    f"<think>a</think>b {CALL}",
    f"{CALL}\n{CALL}",
    f"Before.\n{CALL}",
    CALL[:-30],
    "<tool_call>no json at all</tool_call>",
    "é" * 9 + "\n\n",
]


def deltas(text: str, cuts: Sequence[int], reason: FinishReason = FinishReason.STOP) -> list[TextDelta]:
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    made = [TextDelta(0, text[a:b], array("i", [1])) for a, b in pairwise(places)]
    return [*made, TextDelta(0, "", array("i"), finish_reason=reason, usage=USAGE)]


def form(kind: str, answer_format: AnswerFormat | None, **facts: Any) -> AnswerSpec:
    told = {"num_prompt_tokens": 30, "max_tokens": 12, "shows_thinking": True, "is_chat": True}
    return AnswerSpec(kind, IDENTITY, facts={**told, "format": answer_format, **facts})


def streamed(made: AnswerSpec, pieces: Sequence[TextDelta]) -> bytes:
    shape = ENCODERS[made.kind](made, TOKENIZER)
    return b"".join((shape.head, *(shape.chunk(0, piece) for piece in pieces), shape.last()))


def whole(made: AnswerSpec, pieces: Sequence[TextDelta]) -> Any:
    return json.loads(msgspec.json.encode(ENCODERS[made.kind](made, TOKENIZER).whole([Choice(list(pieces))])))


def message_of(stream: bytes) -> Any:
    """What a client makes of the events."""
    message: Any = None
    inputs: dict[int, str] = {}
    for kind, event in stream_events(stream.decode()):
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            add(message["content"][event["index"]], event, inputs)
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, text in inputs.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            message["content"][index]["input"] = {"INVALID_JSON": text}
    return message


def add(block: Any, event: Any, inputs: dict[int, str]) -> None:
    delta = event["delta"]
    if delta["type"] == "input_json_delta":
        inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        name = delta["type"].removesuffix("_delta")
        block[name] += delta[name]


def answer_of(stream: bytes) -> Any:
    """What a client makes of the lines."""
    *parts, last = [json.loads(line) for line in stream.decode().splitlines()]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        assert not part["done"]
        message["content"] += part["message"]["content"]
        if "thinking" in part["message"]:
            message["thinking"] = message.get("thinking", "") + part["message"]["thinking"]
        if "tool_calls" in part["message"]:
            message["tool_calls"] = message.get("tool_calls", []) + part["message"]["tool_calls"]
    return {**last, "message": message}


CUTS = st.lists(st.integers(1, 200), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ANSWERS), CUTS, st.booleans(), st.booleans(), st.booleans())
def test_anthropics_events_add_up(text: str, cuts: list[int], has_format: bool, shows: bool, is_cut: bool) -> None:
    made = form("anthropic", FORMAT if has_format else None, shows_thinking=shows)
    pieces = deltas(text, cuts, FinishReason.LENGTH if is_cut else FinishReason.STOP)
    assert message_of(streamed(made, pieces)) == whole(made, pieces)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ANSWERS), CUTS, st.booleans())
def test_ollamas_lines_add_up(text: str, cuts: list[int], has_format: bool) -> None:
    made = form("ollama", FORMAT if has_format else None)
    pieces = deltas(text, cuts)
    assert answer_of(streamed(made, pieces)) == whole(made, pieces)
    raw = form("ollama", FORMAT if has_format else None, is_chat=False)
    lines = [json.loads(line) for line in streamed(raw, pieces).splitlines()]
    assert "".join(line["response"] for line in lines) == whole(raw, pieces)["response"]


@pytest.mark.parametrize("kind", ["anthropic", "ollama"])
@pytest.mark.parametrize("text", ANSWERS)
def test_a_form_that_was_kept_gives_the_same_bytes(kind: str, text: str) -> None:
    made = form(kind, FORMAT)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=AnswerSpec)
    pieces = deltas(text, [3, 20])
    assert streamed(kept, pieces) == streamed(made, pieces)
    assert whole(kept, pieces) == whole(made, pieces)


def test_blocks_have_what_clients_need() -> None:
    thought, text, call = whole(form("anthropic", FORMAT), deltas(f"<think>a</think>b {CALL}", []))["content"]
    assert thought == {"type": "thinking", "thinking": "a", "signature": SIGNATURE}
    assert text["text"].strip() == "b"
    assert (call["name"], call["input"]) == ("f", {"x": 'é{}"', "y": [1, 2]})


def test_durations_add_up_in_nanoseconds() -> None:
    body = whole(form("ollama", None), deltas("x", []))
    parts = [body[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
    assert parts == [1_000_000, 1_500_000, 7_500_000] and sum(parts) == body["total_duration"]
