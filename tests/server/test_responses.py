"""POST /v1/responses and what is stored of it: conversations, chains, listings, tenants, retries."""

from typing import Any

import pytest

from octavo.config import Config, ResponsesConfig, ServingConfig
from octavo.core.request import ErrorKind, FinishError, FinishReason
from tests.server.fakes import Harness, Wire, keyed
from tests.server.response_events import check_events, check_model, put_together, read_events

PATH = "/v1/responses"


async def post(harness: Harness, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": "tiny", "input": "hi", **fields}
    return await harness.request("POST", PATH, json=body, headers=headers or {})


async def answered(harness: Harness, **fields: Any) -> Any:
    response = await post(harness, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_whole_answer_has_openais_form() -> None:
    from openai.types.responses import Response

    harness = Harness()
    harness.engine.cached_tokens = 5
    body = await answered(harness, instructions="be good", metadata={"a": "b"}, temperature=0.5)
    made = check_model(Response, body)
    assert isinstance(made, Response)
    assert made.output_text == "Hello é!"
    assert (made.object, made.status, made.model, made.temperature) == ("response", "completed", "tiny", 0.5)
    assert (made.metadata, made.instructions, made.error) == ({"a": "b"}, "be good", None)
    prompt = len(b"system:be good\nuser:hi\nassistant:")
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (prompt, 10, prompt + 10)
    assert made.usage.input_tokens_details.cached_tokens == 5
    assert set(body["timings"]) >= {"queue_s", "prefill_s", "decode_s", "tokens_per_s"}


async def test_length_is_told() -> None:
    body = await answered(Harness(), max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["content"][0]["text"] == "He"
    events = read_events((await post(Harness(), max_output_tokens=2, stream=True)).text)
    assert events[-1]["type"] == "response.incomplete"


async def test_a_stream_has_typed_events_and_ends_without_done() -> None:
    harness = Harness()
    response = await post(harness, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = read_events(response.text)
    check_events(events)
    assert put_together(events) == events[-1]["response"]["output"]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "Hello é!"
    kept = (await harness.get(f"{PATH}/{events[0]['response']['id']}")).json()
    assert kept == events[-1]["response"]


async def test_a_failure_in_mid_stream_is_told_and_not_kept() -> None:
    harness = Harness()
    harness.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE, "the model is not well"))
    events = read_events((await post(harness, stream=True)).text)
    check_events(events)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "engine_error"
    assert (await harness.get(f"{PATH}/{events[0]['response']['id']}")).status_code == 404
    assert (await post(harness)).status_code == 500


ITEMS: dict[str, tuple[list[Any], str]] = {
    "roles": (
        [
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "more"},
        ],
        "system:be brief\nuser:q\nassistant:a\nuser:more\nassistant:",
    ),
    "parts": (
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        "user:a\nb\nassistant:",
    ),
    "an answer as it came": (
        [
            {"role": "user", "content": "q"},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
            },
            {"role": "user", "content": "r"},
        ],
        "user:q\nassistant:a\nuser:r\nassistant:",
    ),
    "a refusal": (
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": "r"},
        ],
        "user:q\nassistant:no\nuser:r\nassistant:",
    ),
}


@pytest.mark.parametrize("name", ITEMS)
async def test_items_become_messages(name: str) -> None:
    items, prompt = ITEMS[name]
    harness = Harness()
    await answered(harness, input=items)
    assert harness.prompt == prompt


async def test_instructions_and_the_system_messages_behind_them_are_one() -> None:
    harness = Harness()
    items = [{"role": "system", "content": "b"}, {"role": "user", "content": "q"}, {"role": "system", "content": "c"}]
    await answered(harness, instructions="a", input=items)
    assert harness.prompt == "system:a\n\nb\nuser:q\nsystem:c\nassistant:"


async def test_a_response_goes_on_from_the_one_before_but_not_with_its_instructions() -> None:
    harness = Harness()
    first = await answered(harness, instructions="be good", input="one")
    second = await answered(harness, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert harness.prompt == "user:one\nassistant:Hello é!\nuser:two\nassistant:"
    events = read_events((await post(harness, input="three", previous_response_id=second["id"], stream=True)).text)
    before = "user:one\nassistant:Hello é!\nuser:two\nassistant:Hello é!\n"
    assert harness.prompt == before + "user:three\nassistant:"
    await answered(harness, input="other", previous_response_id=second["id"], instructions="x")
    assert harness.prompt == "system:x\n" + before + "user:other\nassistant:"
    assert (await harness.get(f"{PATH}/{events[-1]['response']['id']}")).status_code == 200


async def test_the_client_may_go_on_as_soon_as_it_has_the_last_event() -> None:
    harness = Harness()
    wire = Wire(harness.app, PATH, {"input": "hi", "stream": True})
    task = wire.start()
    await wire.until(lambda: "response.completed" in wire.text)
    response_id = read_events(wire.text)[-1]["response"]["id"]
    assert (await post(harness, previous_response_id=response_id)).status_code == 200
    await task


async def test_store_false_keeps_nothing() -> None:
    harness = Harness()
    body = await answered(harness, store=False)
    assert body["store"] is False and len(harness.context.responses) == 0
    assert (await post(harness, previous_response_id=body["id"])).status_code == 404


async def test_a_server_that_keeps_nothing_says_so() -> None:
    harness = Harness(config=Config(responses=ResponsesConfig(max_stored_responses=0)))
    body = await answered(harness)
    assert body["store"] is False
    response = await post(harness, store=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "store")


async def test_deleting() -> None:
    harness = Harness()
    first = await answered(harness, input="one")
    second = await answered(harness, input="two", previous_response_id=first["id"])
    response = await harness.request("DELETE", f"{PATH}/{first['id']}")
    assert response.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert (await harness.get(f"{PATH}/{first['id']}")).status_code == 404
    assert (await harness.request("DELETE", f"{PATH}/{first['id']}")).status_code == 404
    await answered(harness, input="three", previous_response_id=second["id"])
    assert harness.prompt.startswith("user:one\nassistant:Hello é!\nuser:two\n")


async def test_input_items_are_listed_in_pages_and_in_both_orders() -> None:
    from openai.types.responses import ResponseItemList

    harness = Harness()
    first = await answered(harness, input=[{"role": "user", "content": str(i)} for i in range(3)])
    second = await answered(harness, input="last", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    page = (await harness.get(path)).json()
    check_model(ResponseItemList, page)
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["last", "Hello é!", "2", "1", "0"] and page["has_more"] is False
    page = (await harness.get(path, params={"order": "asc", "limit": 2})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"] and page["has_more"] is True
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][1]["id"])
    page = (await harness.get(path, params={"order": "asc", "after": page["last_id"], "limit": 100})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "Hello é!", "last"]
    for name, value in {"limit": "0", "order": "up", "after": "x", "before": "x"}.items():
        response = await harness.get(path, params={name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_items_can_be_referred_to() -> None:
    harness = Harness()
    first = await answered(harness, input="one")
    items = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "two"}]
    second = await answered(harness, input=items)
    assert harness.prompt == "assistant:Hello é!\nuser:two\nassistant:"
    listed = (await harness.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert listed[0] == first["output"][0]
    await answered(harness, input=[{"id": first["output"][0]["id"]}, {"role": "user", "content": "three"}])
    assert harness.prompt == "assistant:Hello é!\nuser:three\nassistant:"


async def test_tenants_find_their_own_only() -> None:
    harness = Harness(config=keyed("k1", "k2"))
    own, other = {"authorization": "Bearer k1"}, {"authorization": "Bearer k2"}
    body = (await post(harness, headers=own)).json()
    path = f"{PATH}/{body['id']}"
    assert (await harness.get(path, headers=own)).status_code == 200
    for attempt in (
        harness.get(path, headers=other),
        harness.request("DELETE", path, headers=other),
        harness.get(path + "/input_items", headers=other),
        post(harness, headers=other, previous_response_id=body["id"]),
    ):
        response = await attempt
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    reference = [{"type": "item_reference", "id": body["output"][0]["id"]}]
    assert (await post(harness, headers=other, input=reference)).status_code == 400
    assert (await harness.get(path)).status_code == 401
    assert (await harness.get(path, headers=own)).status_code == 200


async def test_what_is_stored_can_be_read_but_not_streamed_or_cancelled() -> None:
    harness = Harness()
    body = await answered(harness)
    path = f"{PATH}/{body['id']}"
    assert (await harness.get(path)).json() == body
    assert (await harness.get(path, params={"include[]": "message.output_text.logprobs"})).json() == body
    response = await harness.get(path, params={"stream": "true"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
    response = await harness.get(path, params={"surprise": "1"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "surprise")
    assert (await harness.request("POST", path + "/cancel")).status_code == 400
    assert (await harness.request("POST", f"{PATH}/resp_no/cancel")).status_code == 404


async def test_input_tokens_are_counted_without_an_answer() -> None:
    harness = Harness()
    response = await harness.request("POST", PATH + "/input_tokens", json={"input": "hi", "instructions": "x"})
    assert response.json() == {"object": "response.input_tokens", "input_tokens": len("system:x\nuser:hi\nassistant:")}
    assert not harness.engine.requests and len(harness.context.responses) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_response(stream: bool) -> None:
    harness = Harness()
    key = {"idempotency-key": "k"}
    first, second = [await post(harness, headers=key, stream=stream) for _ in range(2)]
    assert first.content == second.content and len(harness.engine.requests) == 1
    assert len(harness.context.responses) == 1
    if stream:
        events = read_events(first.text)
        check_events(events)
        assert put_together(events) == events[-1]["response"]["output"]
    response = await post(harness, headers={**key, "last-event-id": "1"}, stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_the_whole_answer_and_the_stream_of_one_run_are_equal() -> None:
    harness = Harness()
    key = {"idempotency-key": "k"}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await post(harness, headers=key, **logprobs)).json()
    plain = (await post(harness, **logprobs)).json()
    assert [part["text"] for part in whole["output"][0]["content"]] == ["Hello é!"]
    assert whole["output"][0]["content"] == plain["output"][0]["content"]


async def test_a_long_conversation_is_read_off_the_loop_to_the_same_end() -> None:
    harness = Harness()
    items = [{"role": "user", "content": f"{i} " + "x" * 20} for i in range(100)]
    first = await answered(harness, input=items, max_output_tokens=1)
    assert first["usage"]["input_tokens"] == len(harness.prompt)
    many = [{"role": "user", "content": ""} for _ in range(2000)]
    response = await post(harness, input=many)
    assert response.status_code == 400  # it cannot fit


async def test_more_items_than_a_chat_may_have_are_refused_by_name() -> None:
    harness = Harness()
    first = await answered(harness, input=[{"role": "user", "content": ""}] * 500)
    response = await post(harness, input=[{"role": "user", "content": ""}] * 1600, previous_response_id=first["id"])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input") and "2048" in error["message"]


async def test_keys_are_asked_for_and_the_bound_address_is_the_same() -> None:
    harness = Harness(config=Config(serving=ServingConfig(api_key=("k",))))
    for method, path in (("POST", PATH), ("GET", PATH + "/x"), ("POST", PATH + "/input_tokens")):
        assert (await harness.request(method, path, json={"input": "hi"})).status_code == 401


async def test_truncation_leaves_out_the_oldest_turns_and_no_more_than_must_go() -> None:
    harness = Harness()
    turns = [
        {"role": role, "content": f"{role[0]}{i} " + "x" * 290} for i in range(8) for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "now"}]
    response = await post(harness, input=items, max_output_tokens=100)
    assert response.status_code == 400
    body = await answered(harness, input=items, instructions="be good", max_output_tokens=100, truncation="auto")
    assert body["truncation"] == "auto"
    assert harness.prompt.startswith("system:be good\nuser:u2 ") and harness.prompt.endswith("user:now\nassistant:")
    assert len(harness.prompt) <= 4096 - 100 < len(harness.prompt) + 2 * 300
    listed = (await harness.get(f"{PATH}/{body['id']}/input_items", params={"limit": 100})).json()["data"]
    assert len(listed) == len(items)  # all of it is kept
    whole = {"input": items[-3:], "truncation": "auto"}
    await answered(harness, **whole)
    assert harness.prompt.startswith("user:u7 ")


async def test_truncation_does_not_help_what_cannot_fit() -> None:
    harness = Harness()
    response = await post(harness, input="x" * 5000, truncation="auto")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    many = [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "a"}] * 3
    await answered(harness, input=[*many, {"role": "user", "content": "short"}], truncation="auto")
    assert harness.prompt == "user:short\nassistant:"


USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c1"}
OUTPUT = {"type": "function_call_output", "output": "r", "call_id": "c1"}
FUNCTION = {"type": "function", "name": "f", "description": "", "strict": False, "parameters": {"type": "object"}}
# Bodies as agents and frameworks write them, with what they always send and nulls.
AGENTS: dict[str, dict[str, Any]] = {
    "a coding agent without stored responses": {
        "instructions": "You write code.",
        "input": [USER, {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}, CALL, OUTPUT],
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
    },
    "a chain of calls": {
        "input": [
            {"content": "q", "role": "user", "type": "message"},
            {
                "type": "message",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
                "role": "assistant",
                "id": "msg_1",
            },
            {**CALL, "id": "fc_1", "status": "completed"},
            OUTPUT,
        ],
        "tools": [FUNCTION],
        "stream": False,
    },
    "a framework with nulls": {
        "input": [{"content": "q", "role": "user"}],
        "include": [],
        "tools": [],
        "instructions": None,
        "metadata": None,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "reasoning": {"effort": None},
        "truncation": None,
        "tool_choice": None,
    },
}


@pytest.mark.parametrize("name", AGENTS)
async def test_bodies_of_agents_are_answered(name: str) -> None:
    harness = Harness()
    response = await post(harness, **AGENTS[name])
    assert response.status_code == 200, response.text
    assert "q" in harness.prompt
