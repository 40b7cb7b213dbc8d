"""Reading streams of the Responses API: as bytes, through the openai package's models, and put together again."""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

OUR_OWN = {"store", "timings", "name", "bytes"}  # fields that the package's models do not list
MODELS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}
Event = dict[str, Any]


def read_events(body: str) -> list[Event]:
    """The events of a stream: each an `event:` and a `data:` line of one type, numbered from 0."""
    found: list[Event] = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(": "):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def check_model(model: type[BaseModel], data: Any) -> BaseModel:
    """Take it strictly; every field must be one of the model's, or one that we say we add."""
    made = model.model_validate(data, strict=True)
    extras = set(_extras(made))
    assert extras <= OUR_OWN, extras
    missing = {name for name, field in model.model_fields.items() if field.is_required()} - set(data)
    assert not missing
    return made


def _extras(value: object) -> list[str]:
    if isinstance(value, BaseModel):
        inner = [name for part in value.__dict__.values() for name in _extras(part)]
        return [*(value.model_extra or ()), *inner]
    if isinstance(value, list):
        return [name for part in value for name in _extras(part)]
    return []


def check_events(events: list[Event]) -> None:
    """Every event is what the package expects of its type."""
    for event in events:
        check_model(MODELS[event["type"]], event)
        if "response" in event:
            check_model(Response, event["response"])


def put_together(events: list[Event]) -> list[Any]:
    """The output as the deltas alone tell it."""
    output: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case "response.content_part.added":
                assert event["content_index"] == len(output[-1]["content"])
                output[-1]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = output[-1]["content"][-1]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "response.function_call_arguments.delta":
                output[-1]["arguments"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event["text"] == output[-1]["content"][-1]["text"]
            case "response.function_call_arguments.done":
                assert event["arguments"] == output[-1]["arguments"]
            case "response.content_part.done":
                assert event["part"] == output[-1]["content"][-1]
            case "response.output_item.done":
                assert event["output_index"] == len(output) - 1
                output[-1]["status"] = event["item"]["status"]
                assert event["item"] == output[-1]
    return output
