"""Tools of MCP servers in /v1/responses: the openai package, a real server, a scripted model, real MCP servers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.fake_server import RealServer
from tests.server.response_events import check_events, check_model, read_events
from tests.test_mcp import SCRIPT

pytest.importorskip("mcp", reason="the extra mcp is not installed")

ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
RULES: list[dict[str, Any]] = [
    {"role": "tool", "equals": "5", "say": "It is five."},
    {"role": "tool", "equals": "8", "call": {"name": "add", "arguments": {"a": 8, "b": 0}}},
    {"role": "tool", "contains": "max_tool_calls", "say": "Enough."},
    {"role": "tool", "contains": "declined", "say": "As you like."},
    {"contains": "obey", "say": "Seen."},
    {"role": "tool", "echo": True},
    {"equals": "add", "think": "Let me see.", "say": "I add.", "call": ADD},
    {"equals": "just add", "call": ADD},
    {"equals": "twice", "call": [{"name": "add", "arguments": {"a": 4, "b": 4}}, ADD]},
    {"equals": "for ever", "call": {"name": "add", "arguments": {"a": 8, "b": 0}}},
    {"equals": "boom", "call": {"name": "boom"}},
    {"equals": "slow", "call": {"name": "slow", "arguments": {"seconds": 1000}}},
    {"equals": "ping", "call": {"name": "ping"}},
    {"equals": "mixed", "call": [ADD, {"name": "mine", "arguments": {}}]},
    {"equals": "mine", "call": {"name": "mine"}},
    {"equals": "other", "call": {"name": "other"}},
    {"equals": "die", "call": ADD, "fail_after": 20},
    {"equals": "what was it?", "say": "Five, as I said."},
    {"say": "Hello."},
]
MODES = ("hang", "die", "huge", "wrong", "silent", "tokens", "rubbish")
HI = {"role": "user", "content": "hi"}
MINE: Any = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.json").write_text(json.dumps(RULES))
    command = {"command": sys.executable, "args": [str(SCRIPT)]}
    servers: dict[str, Any] = {mode: {**command, "args": [str(SCRIPT), mode]} for mode in MODES}
    servers["nowhere"] = {"url": "http://127.0.0.1:9/mcp?key=hidden", "headers": {"Authorization": "Bearer hidden"}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    flags = ("--mcp", f"calc={sys.executable} {SCRIPT} good", "--mcp-config", str(folder / "mcp.json"))
    model = f"scripted:{folder / 'script.json'}"
    with RealServer(model, folder / "log", "--served-model-name", "m", "--mcp-timeout", "3", *flags) as running:
        yield running
        assert "hidden" not in running.text and "Traceback" not in running.text


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def mcp(label: str = "calc", **fields: Any) -> Any:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **fields}


def ask(client: openai.OpenAI, text: Any, *tools: Any, **fields: Any) -> Response:
    return client.responses.create(model="m", input=text, tools=list(tools) or [mcp()], **fields)


def kinds(response: Response) -> list[str]:
    return [item.type for item in response.output]


def test_the_model_calls_a_tool_and_answers(client: openai.OpenAI) -> None:
    response = ask(client, "add")
    assert kinds(response) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]
    listed, _, _, call, _ = response.output
    assert listed.type == "mcp_list_tools" and listed.server_label == "calc" and listed.error is None
    assert [tool.name for tool in listed.tools] == ["add", "boom", "slow"]
    assert call.type == "mcp_call" and (call.name, call.server_label, call.status) == ("add", "calc", "completed")
    assert json.loads(call.arguments) == {"a": 2, "b": 3} and call.output == "5" and call.error is None
    assert response.output_text == "I add.It is five." and response.status == "completed"
    check_model(Response, json.loads(response.model_dump_json(by_alias=True, exclude_unset=True)))


def test_usage_adds_up(client: openai.OpenAI) -> None:
    counts = client.responses.input_tokens.count(model="m", input="add", tools=[mcp()])
    usage, less = ask(client, "add").usage, ask(client, "hello").usage
    assert usage is not None and less is not None and less.output_tokens == len("Hello.") + 1
    assert usage.input_tokens > 2 * counts.input_tokens, "two prompts, the second with the call and its result"
    assert usage.output_tokens > len("I add.It is five.") and usage.total_tokens == sum(
        (usage.input_tokens, usage.output_tokens)
    )


def test_streamed_events_are_those_of_openai(server: RealServer, client: openai.OpenAI) -> None:
    body = {"model": "m", "input": "twice", "tools": [mcp()], "stream": True}
    events = read_events(httpx.post(server.url + "/v1/responses", json=body, timeout=30).text)
    check_events(events)
    names = [event["type"].removeprefix("response.") for event in events]
    of_lists = ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"]
    assert names[:6] == ["created", "in_progress", *of_lists]
    of_calls = [name for name in names if name.startswith("mcp_call") and not name.endswith("delta")]
    assert of_calls == ["mcp_call.in_progress", "mcp_call_arguments.done"] * 2 + ["mcp_call.completed"] * 2
    assert "mcp_call_arguments.delta" in names and names[-1] == "completed"
    response = events[-1]["response"]
    done = {event["output_index"]: event["item"] for event in events if event["type"].endswith("output_item.done")}
    assert [done[index] for index in range(len(done))] == response["output"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.mcp_call_arguments.delta":
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert deltas == {item["id"]: item["arguments"] for item in response["output"] if item["type"] == "mcp_call"}
    with client.responses.stream(model="m", input="add", tools=[mcp()]) as stream:
        assert stream.get_final_response().output_text == "I add.It is five."


def test_a_call_needs_approval_unless_the_client_says_never(client: openai.OpenAI) -> None:
    tool = {"type": "mcp", "server_label": "calc"}
    first = ask(client, "add", tool)
    request = first.output[-1]
    assert request.type == "mcp_approval_request" and first.status == "completed"
    assert (request.name, json.loads(request.arguments)) == ("add", {"a": 2, "b": 3})
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    second = ask(client, [answer], tool, previous_response_id=first.id)
    assert kinds(second) == ["mcp_call", "message"] and second.output_text == "It is five."
    call = second.output[0]
    assert call.type == "mcp_call" and call.approval_request_id == request.id and call.output == "5"
    third = ask(client, "what was it?", tool, previous_response_id=second.id)
    assert third.output_text == "Five, as I said." and kinds(third) == ["message"]
    again = ask(client, [answer, {"role": "user", "content": "hi"}], tool, previous_response_id=second.id)
    assert kinds(again) == ["message"], "an approved call is made once"
    no = ask(client, [{**answer, "approve": False, "reason": "no"}], tool, previous_response_id=first.id)
    assert kinds(no) == ["message"] and no.output_text == "As you like."


def test_a_conversation_is_continued_without_a_store(client: openai.OpenAI) -> None:
    tool = {"type": "mcp", "server_label": "calc"}
    first = ask(client, "add", tool, store=False)
    items: Any = [{"role": "user", "content": "add"}, *(item.model_dump() for item in first.output)]
    items.append({"type": "mcp_approval_response", "approval_request_id": first.output[-1].id, "approve": True})
    second = ask(client, items, tool, store=False)
    assert kinds(second) == ["mcp_call", "message"] and second.output_text == "It is five."
    items += [item.model_dump() for item in second.output] + [{"role": "user", "content": "what was it?"}]
    assert ask(client, items, tool, store=False).output_text == "Five, as I said."


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ({"never": {"tool_names": ["add"]}}, "message"),
        ({"never": {"read_only": True}}, "message"),
        ({"never": {"tool_names": ["boom"]}}, "mcp_approval_request"),
        ({"always": {"tool_names": ["add"]}, "never": {"tool_names": ["add"]}}, "mcp_approval_request"),
        ("always", "mcp_approval_request"),
        (None, "mcp_approval_request"),
    ],
)
def test_approval_may_depend_on_the_tool(client: openai.OpenAI, rule: Any, kind: str) -> None:
    assert kinds(ask(client, "add", mcp(require_approval=rule)))[-1] == kind


@pytest.mark.parametrize("allowed", [["boom"], {"tool_names": ["boom"]}, {"read_only": False}, []])
def test_only_allowed_tools_are_shown_and_called(client: openai.OpenAI, allowed: Any) -> None:
    response = ask(client, "add", mcp(allowed_tools=allowed))
    listed = response.output[0]
    assert listed.type == "mcp_list_tools" and "add" not in [tool.name for tool in listed.tools]
    assert "mcp_call" not in kinds(response), "a call of another name is not made"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another label": ({"tools": [mcp("other")]}, "tools[0].server_label"),
    "another url": ({"tools": [mcp(server_url="http://127.0.0.1:9/x")]}, "tools[0].server_url"),
    "another url of a server with one": ({"tools": [mcp("nowhere", server_url="http://h/")]}, "tools[0].server_url"),
    "a label twice": ({"tools": [mcp(), mcp()]}, "tools[0].server_label"),
    "headers": ({"tools": [mcp(headers={"a": "b"})]}, "tools[0].headers"),
    "a token": ({"tools": [mcp(authorization="x")]}, "tools[0].authorization"),
    "a connector": ({"tools": [mcp(connector_id="connector_gmail")]}, "tools[0].connector_id"),
    "no label": ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
    "a wrong rule": ({"tools": [mcp(require_approval="sometimes")]}, "tools[0].require_approval"),
    "a choice of another": ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    "no calls": ({"max_tool_calls": 0}, "max_tool_calls"),
    "an unknown approval": (
        {"input": [HI, {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}]},
        "input[1].approval_request_id",
    ),
    "a call of another server": (
        {
            "input": [
                HI,
                {"type": "mcp_approval_request", "id": "r", "server_label": "die", "name": "ping", "arguments": "{}"},
                {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True},
            ]
        },
        "input[2].approval_request_id",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_did_not_allow_is_refused(server: RealServer, name: str) -> None:
    fields, param = REFUSED[name]
    body = {"model": "m", "input": "hi", "tools": [mcp()], **fields}
    answer = httpx.post(server.url + "/v1/responses", json=body, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param), error


def test_the_operators_own_url_may_be_given(client: openai.OpenAI) -> None:
    response = ask(client, "hi", mcp("nowhere", server_url="http://127.0.0.1:9/mcp?key=hidden"))
    listed = response.output[0]
    assert listed.type == "mcp_list_tools" and "cannot be reached" in (listed.error or "") and not listed.tools
    assert response.output_text == "Hello." and "key" not in (listed.error or "")


@pytest.mark.parametrize("mode", MODES)
def test_a_hostile_server_costs_one_item(server: RealServer, client: openai.OpenAI, mode: str) -> None:
    response = ask(client, "ping", mcp(mode), mcp())
    assert response.status == "completed"
    errors = [item.error for item in response.output if item.type in ("mcp_list_tools", "mcp_call") and item.error]
    if mode == "tokens":
        assert not errors and response.output_text == "Seen." and kinds(response).count("mcp_call") == 1
    else:
        assert errors and "Traceback" not in str(errors) and "goodbye" not in str(errors)
    assert ask(client, "add").output_text == "I add.It is five.", "other servers and requests go on"


def test_a_tool_that_fails_is_told_to_the_model(client: openai.OpenAI) -> None:
    response = ask(client, "boom")
    call = next(item for item in response.output if item.type == "mcp_call")
    assert call.status == "failed" and call.output is None and call.error is not None
    assert call.error.type == "mcp_tool_execution_error" and "boom" in response.output_text


def test_calls_are_bounded(client: openai.OpenAI) -> None:
    response = ask(client, "for ever", max_tool_calls=3)
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert len(calls) == 3 and response.max_tool_calls == 3, "the model is not shown the tools again"
    assert response.status == "completed"
    assert kinds(ask(client, "for ever")).count("mcp_call") == 16
    both = ask(client, "twice", max_tool_calls=1)
    last = [item for item in both.output if item.type == "mcp_call"][-1]
    assert "max_tool_calls is 1" in str(last.error) and both.output_text == "Enough."


def test_tokens_are_bounded_over_all_rounds(client: openai.OpenAI) -> None:
    response = ask(client, "add", max_output_tokens=1000)
    assert response.status == "completed" and response.usage is not None
    most = response.usage.output_tokens - 4
    cut = ask(client, "add", max_output_tokens=most)
    assert cut.status == "incomplete" and cut.usage is not None and cut.usage.output_tokens == most


def test_functions_of_the_client_and_tools_of_servers_mix(client: openai.OpenAI) -> None:
    response = ask(client, "mixed", mcp(), MINE)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    call = response.output[-1]
    assert call.type == "function_call" and call.name == "mine"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    assert ask(client, [output], mcp(), MINE, previous_response_id=response.id).output_text == "It is five."


@pytest.mark.parametrize("choice", ["required", {"type": "mcp", "server_label": "calc", "name": "add"}])
def test_a_forced_call_is_forced_once(client: openai.OpenAI, choice: Any) -> None:
    response = ask(client, "just add", tool_choice=choice)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"] and response.output_text == "It is five."


def test_no_tool_is_called_if_none_is_chosen(client: openai.OpenAI) -> None:
    assert "mcp_call" not in kinds(ask(client, "add", tool_choice="none"))


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    response = ask(client, "add", background=True)
    assert response.status == "in_progress"
    end = time.monotonic() + 60
    while (response := client.responses.retrieve(response.id)).status == "in_progress" and time.monotonic() < end:
        time.sleep(0.05)
    assert response.status == "completed" and response.output_text == "I add.It is five."
    events = list(client.responses.retrieve(response.id, stream=True))
    later = list(client.responses.retrieve(response.id, stream=True, starting_after=5))
    assert [event.sequence_number for event in events] == list(range(len(events))) and later == events[6:]
    assert ask(client, "what was it?", previous_response_id=response.id).output_text == "Five, as I said."


def test_a_cancelled_response_cancels_its_call(client: openai.OpenAI) -> None:
    response = ask(client, "slow", background=True)
    time.sleep(0.5)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    call = cancelled.output[-1]
    assert call.type == "mcp_call" and call.status == "incomplete"


async def test_a_client_that_leaves_ends_its_response(server: RealServer) -> None:
    body = {"model": "m", "input": "slow", "tools": [mcp()], "stream": True}
    async with httpx.AsyncClient(timeout=30) as client:
        async with client.stream("POST", server.url + "/v1/responses", json=body) as answer:
            async for line in answer.aiter_lines():
                if "mcp_call_arguments.done" in line:
                    break
        end = time.monotonic() + 60
        while time.monotonic() < end:
            health = (await client.get(server.url + "/metrics")).text
            running = [line for line in health.split("\n") if line.startswith("octavo_open_requests")]
            if not running or running[0].endswith(" 0.0"):
                break
            await asyncio.sleep(0.1)
        done = await client.post(server.url + "/v1/responses", json={**body, "input": "add", "stream": False})
    assert done.json()["status"] == "completed"


def test_an_engine_that_fails_ends_the_response(server: RealServer, client: openai.OpenAI) -> None:
    body = {"model": "m", "input": "die", "tools": [mcp()], "stream": True}
    events = read_events(httpx.post(server.url + "/v1/responses", json=body, timeout=30).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    with pytest.raises(openai.APIStatusError):
        ask(client, "die")


def test_a_key_for_retries_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        ask(client, "add", extra_headers={"Idempotency-Key": "k"})


def test_many_at_once(server: RealServer) -> None:
    async def run() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [
                {"model": "m", "input": text, "tools": [mcp(), mcp("hang")]} for text in ["add"] * 20 + ["ping"] * 4
            ]
            answers = await asyncio.gather(*(client.post(server.url + "/v1/responses", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    found = asyncio.run(run())
    assert all(answer["status"] == "completed" for answer in found)
    assert sum("It is five." in json.dumps(answer) for answer in found) == 20


def test_without_servers_the_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(RULES))
    with RealServer(f"scripted:{tmp_path / 'script.json'}", tmp_path / "log") as server:
        answer = httpx.post(server.url + "/v1/responses", json={"input": "hi", "tools": [mcp()]}, timeout=30)
        assert answer.status_code == 400 and "it has no MCP servers" in answer.json()["error"]["message"]
