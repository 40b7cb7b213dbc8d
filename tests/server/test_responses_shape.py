"""Answers of /v1/responses from their parts: items, events, and that both tell the same."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason
from octavo.frontend.outputs import TextDelta, Usage
from octavo.server.encoding import ENCODERS, AnswerSpec, Choice
from octavo.server.http.errors import ApiError
from octavo.text.answer_format import AnswerFormat
from tests.server.fakes import make_text
from tests.server.response_events import check_events, check_model, put_together, read_events

ECHO = {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "temperature": 1.0,
    "metadata": {},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
}
FORMAT = AnswerFormat(reasoning=("<think>", "</think>"), calls="hermes", names=("add", "now"))
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TEXTS = {
    "text": "Hello é!",
    "nothing": "",
    "reasoning": "<think>So it is.</think>\n\nYes.",
    "a call": CALL % ("add", '{"a": 1, "b": "}"}'),
    "two calls": CALL % ("add", '{"a": 1}') + "\n" + CALL % ("now", "{}"),
    "all of it": "<think>I add.</think>I will add." + CALL % ("add", '{"a": [1, 2]}'),
}
KINDS = {
    "text": ["message"],
    "nothing": ["message"],
    "reasoning": ["reasoning", "message"],
    "a call": ["function_call"],
    "two calls": ["function_call", "function_call"],
    "all of it": ["reasoning", "message", "function_call"],
}
USAGE = Usage(7, 20, 3, 0.0, 0.1, 2.5)


def form_of(answer_format: AnswerFormat | None = FORMAT) -> AnswerSpec:
    echo = {name: json.dumps(value) for name, value in ECHO.items()}
    facts: dict[str, Any] = {"id": "resp_ab", "echo": echo, "num_prompt_tokens": 7}
    if answer_format is not None:
        facts["format"] = msgspec.to_builtins(answer_format)
    return AnswerSpec("response", ("resp-x", 1000, "tiny"), facts=facts)


def deltas_of(text: str, size: int, end: FinishReason = FinishReason.STOP, has_logprobs: bool = False) -> list[Any]:
    """A text in pieces, then its end."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    entries = {piece: (TokenLogprobs(5, -0.5, 1, (5,), (-0.5,)),) for piece in pieces} if has_logprobs else {}
    deltas = [TextDelta(0, piece, array("i", [5]), entries.get(piece)) for piece in pieces]
    return [*deltas, TextDelta(0, "", array("i", [1]), finish_reason=end, usage=USAGE)]


def stream_of(form: AnswerSpec, deltas: list[TextDelta]) -> list[Any]:
    shape = ENCODERS[form.kind](form, make_text().tokenizer)
    return read_events(b"".join((shape.head, *(shape.chunk(0, delta) for delta in deltas), shape.last())).decode())


def whole_of(form: AnswerSpec, deltas: list[TextDelta]) -> Any:
    return json.loads(msgspec.json.encode(ENCODERS[form.kind](form, make_text().tokenizer).whole([Choice(deltas)])))


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_tells_what_the_whole_answer_has(name: str, end: FinishReason) -> None:
    form = form_of()
    whole = whole_of(form, deltas_of(TEXTS[name], 1000, end))
    for size in (1, 3, 1000):
        events = stream_of(form, deltas_of(TEXTS[name], size, end))
        check_events(events)
        assert put_together(events) == whole["output"]
        assert events[-1]["response"] == whole
        assert whole_of(form, deltas_of(TEXTS[name], size, end)) == whole
    check_model(Response, whole)
    assert [item["type"] for item in whole["output"]] == KINDS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_the_events_come_in_their_order(name: str) -> None:
    events = [event["type"].removeprefix("response.") for event in stream_of(form_of(), deltas_of(TEXTS[name], 4))]
    assert events[:2] == ["created", "in_progress"] and events[-1] == "completed"
    inner = [event for event in events[2:-1] if not event.endswith(".delta")]
    per_kind = {
        "message": ["content_part.added", "output_text.done", "content_part.done"],
        "reasoning": ["content_part.added", "reasoning_text.done", "content_part.done"],
        "function_call": ["function_call_arguments.done"],
    }
    assert inner == [
        event for kind in KINDS[name] for event in ("output_item.added", *per_kind[kind], "output_item.done")
    ]


def test_items_have_ids_of_their_own_with_openais_prefixes() -> None:
    (reasoning, message, call) = whole_of(form_of(), deltas_of(TEXTS["all of it"], 5))["output"]
    assert (reasoning["id"], message["id"], call["id"]) == ("rs_ab00", "msg_ab01", "fc_ab02")
    assert call["call_id"].startswith("call_") and call["name"] == "add"
    assert json.loads(call["arguments"]) == {"a": [1, 2]}
    assert message["content"][0]["text"].strip() == "I will add."
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I add."}]


def test_a_cut_answer_is_incomplete_with_its_last_item() -> None:
    whole = whole_of(form_of(), deltas_of("<think>So", 1000, FinishReason.LENGTH))
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["completed_at"] is None
    (item,) = whole["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("reasoning", "incomplete", "So")
    whole = whole_of(form_of(), deltas_of(TEXTS["reasoning"], 1000, FinishReason.LENGTH))
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_usage_tells_the_reasonings_share() -> None:
    whole = whole_of(form_of(), deltas_of("<think>" + "a" * 43 + "</think>" + "b" * 42, 10))
    assert whole["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": round(20 * 43 / 100)},
        "total_tokens": 27,
    }
    assert (whole["created_at"], whole["completed_at"]) == (1000, 1002)


def test_log_probabilities_belong_to_the_text_alone() -> None:
    form = form_of()
    deltas = deltas_of("<think>So</think>Yes it is.", 1, has_logprobs=True)
    events = stream_of(form, deltas)
    check_events(events)
    whole = whole_of(form, deltas)
    assert put_together(events) == whole["output"] == events[-1]["response"]["output"]
    assert len(whole["output"][1]["content"][0]["logprobs"]) >= len("Yes it is.")
    plain = whole_of(form_of(None), deltas)
    assert len(plain["output"][0]["content"][0]["logprobs"]) == len(deltas) - 1


def test_a_failure_in_mid_stream_ends_the_response() -> None:
    shape = ENCODERS["response"](form_of(), make_text().tokenizer)
    begun = shape.head + b"".join(shape.chunk(0, delta) for delta in deltas_of("Hello", 1)[:3])
    failure = shape.stream_format.error(ApiError(500, "the engine failed", code="engine_error"))
    events = read_events((begun + failure + shape.stream_format.done).decode())
    check_events(events)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("engine_error", "the engine failed")
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine failed"}
    assert put_together(events) == response["output"]
    assert response["output"][0]["status"] == "incomplete"


def test_whoever_keeps_answers_is_told_before_the_end_is() -> None:
    shape = ENCODERS["response"](form_of(), make_text().tokenizer)
    kept: list[Any] = []
    shape.keep = kept.append  # type: ignore[attr-defined]
    deltas = deltas_of("Hi", 1)
    for delta in deltas[:-1]:
        shape.chunk(0, delta)
        assert not kept
    last = shape.chunk(0, deltas[-1])
    assert json.loads(msgspec.json.encode(kept[0])) == json.loads(last.decode().split("data: ")[-1])["response"]


def test_a_form_that_was_kept_gives_the_same_bytes() -> None:
    form = form_of()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=AnswerSpec)
    deltas = deltas_of(TEXTS["all of it"], 3)
    assert stream_of(form, deltas) == stream_of(again, deltas)
    assert whole_of(form, deltas) == whole_of(again, deltas)


def test_events_that_the_reader_has_are_left_out() -> None:
    deltas = deltas_of(TEXTS["text"], 2)
    shape = ENCODERS["response"](form_of(), make_text().tokenizer)
    shape.behind = 5  # type: ignore[attr-defined]
    data = b"".join((shape.head, *(shape.chunk(0, delta) for delta in deltas))).decode()
    numbers = [json.loads(block.split("data: ")[1])["sequence_number"] for block in data.split("\n\n") if block]
    assert numbers == list(range(6, len(stream_of(form_of(), deltas))))
