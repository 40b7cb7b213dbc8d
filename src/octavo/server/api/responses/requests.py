"""/v1/responses: turns a body into a conversation and a request; stores responses; declares the routes.

Owns: assembling the conversation; leaving out its oldest turns if the client requests that; the fields of the request
that the answer repeats. Does not: know the answer's format, or run responses in the background (Background does).
Invariants of truncation: the system messages at the beginning and the user's last turn stay. The rest begins with a
turn of the user, so that no result is shown without its call.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.completions.bodies import ChatBody, read_chat
from octavo.server.api.completions.requests import ChatRequest
from octavo.server.api.fields import field_notes, inline_schema
from octavo.server.api.responses.answers import ID_PREFIX, ResponseEncoder
from octavo.server.api.responses.bodies import (
    IGNORED_RESPONSES,
    MAX_ITEM_ID_CHARACTERS,
    NOT_HERE,
    REFUSED_RESPONSES,
    SPELLING,
    AllowedTools,
    FunctionTool,
    Item,
    ResponsesBody,
    chat_fields,
    read_responses,
)
from octavo.server.api.responses.mcp import (
    DEFAULT_CALLS,
    MAX_SERVER_CALLS,
    McpPlan,
    McpRun,
    McpServerField,
    RunStream,
    ServerTools,
    approved_calls,
    find_tools,
)
from octavo.server.api.responses.store import InputItems, Stored, StoredTurn
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerEncoder, AnswerSpec, Identity
from octavo.server.http.auth import KEY, tenant_of
from octavo.server.http.body import OFF_LOOP_BYTES, json_response, parse_off_loop, read_json
from octavo.server.http.endpoints import Endpoint, Limit, queued
from octavo.server.http.errors import ApiError, bad_field, renamed_fields
from octavo.server.idempotency import IdempotentRequest, RetryKey, StartedRun, key_of
from octavo.server.reply import EventStream, body_hash, open_run, reply

if TYPE_CHECKING:
    from octavo.server.api.completions.bodies import ChatBody
    from octavo.server.context import Context
    from octavo.server.encoding import Json

ANSWER_SHARE = 8  # 1/8 of the model's length is reserved for an answer without a bound
_SYSTEM = ("system", "developer")


async def fitted(context: Context, body: ChatBody) -> ChatBody:
    """Return the body without its oldest turns, removing as few as possible; unchanged if no cut fits. Raises ApiError.

    Each try renders and tokenizes the conversation; 2,048 messages need at most 12 tries.
    """
    reserved = body.max_completion_tokens or context.max_model_len // ANSWER_SHARE
    room = context.max_model_len - max(1, reserved)
    if await _fits(context, body, room):
        return body
    head = next((i for i, message in enumerate(body.messages) if message.role not in _SYSTEM), len(body.messages))
    starts = [i for i, message in enumerate(body.messages) if i > head and message.role == "user"]
    low, high = 0, len(starts)  # the first index in `starts` that fits is in [low, high]
    while low < high:
        middle = (low + high) // 2
        if await _fits(context, _cut(body, head, starts[middle]), room):
            high = middle
        else:
            low = middle + 1
    return _cut(body, head, starts[low]) if low < len(starts) else body


def _cut(body: ChatBody, head: int, start: int) -> ChatBody:
    return body.model_copy(update={"messages": [*body.messages[:head], *body.messages[start:]]})


async def _fits(context: Context, body: ChatBody, room: int) -> bool:
    try:
        return len((await context.prompts.chat(body)).ids) <= room
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return False


_ITEM_CHARACTERS = 64  # counted for each item in addition to its text
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "mcp_approval_response": "mcprs_",
}


@dataclass(frozen=True, slots=True)
class ResponseConversation:
    """A conversation to answer: its ChatBody, all its items, and the new ones, which are stored with the answer.

    `echo` has the fields of the request that the answer repeats, each as JSON: they may be long, and are sent often.
    """

    chat: ChatBody
    items: Sequence[Item]
    given: InputItems
    echo: dict[str, str]


@dataclass(kw_only=True)
class ResponseRequest(ChatRequest):
    """The request of a Responses body. `keep` stores a response; Background stores the ones in the background.

    With a `plan`, it is the first round of a response with tools of MCP servers.
    """

    response_id: str
    echo: Mapping[str, str]
    keep: Callable[[Json], None]
    is_kept: bool
    plan: McpPlan | None = None

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the token ids of the rendered conversation."""
        with renamed_fields(SPELLING):
            return await super().read_prompts()

    async def read_grammar(self) -> str:
        """Return the answer's grammar. Errors have the Responses API's field names."""
        with renamed_fields(SPELLING):
            return await super().read_grammar()

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return the spec, including the fields of the request that the response repeats."""
        spec = super().answer_spec(identity)
        given = {"store": self.is_kept, "temperature": self.params.temperature, "top_p": self.params.top_p}
        facts = {**spec.facts, "id": self.response_id, "echo": {**self.echo, **_texts(given)}}
        return msgspec.structs.replace(spec, facts=facts)


async def response_request(context: Context, tenant: str, body: ResponsesBody) -> ResponseRequest:
    """Return the request of a Responses body. Raises ApiError."""
    is_kept = _is_kept(context, body)
    previous = previous_of(context, tenant, body)
    response_id = ID_PREFIX + uuid.uuid4().hex
    fields = [(index, tool) for index, tool in enumerate(body.tools) if isinstance(tool, McpServerField)]
    own = {tool.name for tool in body.tools if isinstance(tool, FunctionTool)}
    servers = await find_tools(context, fields, own) if fields else ServerTools()
    conversation = await read_conversation(context, tenant, body, previous, (response_id, servers))
    approved = approved_calls(conversation.items, len(body.items), servers)

    def keep(response: Json) -> None:
        context.responses.put(tenant, response, conversation.given, previous)

    def keep_answer(encoder: AnswerEncoder) -> None:
        assert isinstance(encoder, ResponseEncoder)
        encoder.keep = keep

    async def request_of(chat: ChatBody, name: str) -> ResponseRequest:
        with renamed_fields(SPELLING):
            return await ResponseRequest.of(
                context,
                await fitted(context, chat) if body.truncation == "auto" else chat,
                "response",
                "resp",
                name=name,
                session=body.prompt_cache_key or "",
                prompt_param="input",
                can_continue=False,
                response_id=response_id,
                echo=conversation.echo,
                keep=keep,
                is_kept=is_kept,
                prepare=keep_answer if is_kept and not body.background else None,
            )

    first = await request_of(conversation.chat, response_id)
    if not fields:
        return first

    async def next_round(number: int, output: Sequence[Item], may_call: bool, num_tokens: int) -> ResponseRequest:
        if not output:
            return first
        items = [*conversation.items, *output]
        tools = servers if may_call else ServerTools()
        chat = await parse_off_loop(lambda: _read_chat(context, _later(body, num_tokens), items, tools), _size(items))
        return await request_of(chat, f"{response_id}-{number}")

    first.plan = McpPlan(
        tools=servers,
        approved=approved,
        shown={item["server_label"] for item in conversation.items if item["type"] == "mcp_list_tools"},
        max_calls=min(DEFAULT_CALLS if body.max_tool_calls is None else body.max_tool_calls, MAX_SERVER_CALLS),
        max_tokens=body.max_output_tokens,
        next_round=next_round,
    )
    return first


def _read_chat(context: Context, body: ResponsesBody, items: Sequence[Item], servers: ServerTools) -> ChatBody:
    """Return the ChatBody of a conversation. Raises ApiError."""
    with renamed_fields(SPELLING):
        return read_chat(chat_fields(body, items, servers), context.dialect.takes_images)


def _is_kept(context: Context, body: ResponsesBody) -> bool:
    """Return True if the response will be stored. Raises ApiError."""
    if body.store and "store" in body.model_fields_set and not context.responses.is_on:
        raise bad_field("store", "store is true, but this server is set up to keep no responses; leave it out")
    is_kept = body.store and context.responses.is_on
    if body.background and not is_kept:
        remedy = "set store to true" if context.responses.is_on else "this server keeps no responses, leave it out"
        raise bad_field("background", f"background is true, but the response would not be stored; {remedy}")
    return is_kept


def _later(body: ResponsesBody, num_tokens: int) -> ResponsesBody:
    """Return the body for a later round: the choice of tools forces the first round only, and tokens add up."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        choice = choice.model_copy(update={"mode": "auto"})
    elif choice != "none":
        choice = "auto"
    most = body.max_output_tokens
    return body.model_copy(
        update={"tool_choice": choice, "max_output_tokens": None if most is None else most - num_tokens}
    )


def previous_of(context: Context, tenant: str, body: ResponsesBody) -> Stored | None:
    """Return the response that this body continues; None if it continues none. Raises ApiError."""
    if body.previous_response_id is None:
        return None
    previous = context.responses.get(tenant, body.previous_response_id, "previous_response_id")
    if previous.status not in ("completed", "incomplete"):
        message = (
            f"previous_response_id is {body.previous_response_id!r}, which is {previous.status}; nothing to go on from"
        )
        raise bad_field("previous_response_id", message)
    return previous


async def read_conversation(
    context: Context, tenant: str, body: ResponsesBody, previous: Stored | None, made: tuple[str, ServerTools]
) -> ResponseConversation:
    """Assemble all items, including the input. Raises ApiError.

    `made` are the response's id, which makes the ids of items without one, and the tools of MCP servers.
    """
    seed, servers = made
    wanted = {item["id"] for item in body.items if item["type"] == "item_reference"}
    history = previous.history() if previous is not None else ()
    turns = context.responses.turns(tenant, wanted)

    def read() -> ResponseConversation:
        before: list[Item] = [item for items in history for item in msgspec.json.decode(items)]
        known = _linked_items(turns, wanted)
        own = [known[item["id"]] if item["type"] == "item_reference" else item for item in body.items]
        own = [item if "id" in item else _named(item, f"{seed[len(ID_PREFIX) :]}i{i}") for i, item in enumerate(own)]
        chat = _read_chat(context, body, before + own, servers)
        ids = tuple(item["id"] for item in own)
        return ResponseConversation(chat, before + own, InputItems(msgspec.json.encode(own), ids), _echo(body))

    size = _size(body.items) + sum(map(len, history)) + sum(turn.num_bytes for turn in turns)
    size += len(body.instructions or "")
    has_schemas = bool(body.tools) or body.text.format.schema_ is not None  # of unknown size
    is_short = size <= OFF_LOOP_BYTES and not has_schemas
    return read() if is_short else await parse_off_loop(read, size)


def _linked_items(turns: Sequence[StoredTurn], wanted: set[str]) -> dict[str, Item]:
    items = [item for turn in turns for part in (turn.input_items, turn.output) for item in msgspec.json.decode(part)]
    return {item["id"]: item for item in items if item["id"] in wanted}


def _named(item: Item, name: str) -> Item:
    return {"id": _PREFIXES[item["type"]] + name, **item}


def _size(items: Sequence[Item]) -> int:
    """Return the approximate number of characters to parse."""
    size = 0
    for item in items:
        content: Any = item.get("content", item.get("output")) or ""
        size += _ITEM_CHARACTERS + len(item.get("arguments", ""))
        parts = (
            [content]
            if isinstance(content, str)
            else [part.get("text", "") + part.get("image_url", "") for part in content]
        )
        size += sum(map(len, parts))
    return size


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: msgspec.json.encode(value).decode() for name, value in values.items()}


def _echo(body: ResponsesBody) -> dict[str, str]:
    """Return the fields of the request that the answer repeats. Absent fields get their defaults."""
    choice, text_format = body.tool_choice, body.text.format
    shown = text_format.model_dump(exclude_none=True, by_alias=True)
    if text_format.type == "json_schema":
        shown = {"name": "answer", **shown}
    values = {
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation,
        "user": body.user,
    }
    return _texts(values)


MAX_LISTED = 100
_RETRIES = (
    "With a header `Idempotency-Key` the request runs once, however often it is asked for. A stream in the background "
    "is continued with GET, `stream=true` and `starting_after`."
)
_READING = ("include", "include[]", "stream", "starting_after", "include_obfuscation")
_LISTING = ("after", "include", "include[]", "limit", "order")


async def _read(request: Request) -> tuple[ResponseRequest, ResponsesBody]:
    context = context_of(request)
    body = await read_json(
        request, context.limits, lambda fields: read_responses(fields, context.dialect_of(fields).takes_images)
    )
    context = context.for_model(body.model)
    return await response_request(context, tenant_of(request), body), body


async def create(request: Request) -> Response:
    """Answer a conversation of items."""
    wanted, body = await _read(request)
    if wanted.plan is not None:
        return await _with_servers(request, wanted, wanted.plan, is_background=body.background)
    return await _in_background(request, wanted) if body.background else await reply(request, wanted)


async def _with_servers(request: Request, wanted: ResponseRequest, plan: McpPlan, *, is_background: bool) -> Response:
    """Start a response with tools of MCP servers; return it, its first state or its events."""
    context, tenant = wanted.context, tenant_of(request)
    if key_of(request)[0] is not None:
        message = "Idempotency-Key: calls of MCP servers cannot be repeated for a retry; leave the key out"
        raise bad_field("Idempotency-Key", message)
    run = McpRun(request, context, plan)
    await run.start()
    if is_background:
        run.is_detached = True
        context.background.start_calls(tenant, run, _kept_while_stored(context, tenant, wanted))
        return RunStream(run, context) if wanted.stream else json_response(run.encoder.in_progress(), is_private=True)
    if wanted.is_kept:
        run.encoder.keep = wanted.keep
    if wanted.stream:
        return RunStream(run, context)
    try:
        return json_response(await context.lifecycle.supervise(run.finished(), request.receive), is_private=True)
    finally:
        await run.close()


def _kept_while_stored(context: Context, tenant: str, wanted: ResponseRequest) -> Callable[[Json], None]:
    """Return the function that stores a background response's states until it is deleted."""

    def keep(response: Json) -> None:
        if response["status"] == "in_progress" or context.responses.has(tenant, response["id"]):
            wanted.keep(response)

    return keep


async def _in_background(request: Request, wanted: ResponseRequest) -> Response:
    """Start a response that runs without its connection; return its first state or its events."""
    context, tenant = wanted.context, tenant_of(request)
    key, event = key_of(request)
    if event is not None:
        raise bad_field("Last-Event-ID", "Last-Event-ID: continue with GET, stream and starting_after; leave it out")
    if key is None:
        retry = RetryKey(tenant, f"background {wanted.response_id}", b"", is_lasting=False)
    else:
        retry = RetryKey(tenant, key, await body_hash(wanted))
    replay = await open_run(request, wanted, retry)
    encoder = replay.encoder
    assert isinstance(encoder, ResponseEncoder)
    in_progress = encoder.in_progress()
    if context.responses.has(tenant, encoder.response_id):
        await replay.close()  # a retry of the same request
    else:
        context.background.start(retry, replay, _kept_while_stored(context, tenant, wanted))
    if wanted.stream:
        return await _events(context, retry, -1)
    if context.responses.has(tenant, encoder.response_id):
        return json_response(context.responses.get(tenant, encoder.response_id).response(), is_private=True)
    return json_response(in_progress, is_private=True)


async def _events(context: Context, retry: RetryKey, behind: int) -> Response:
    """Return the events of a run after event number `behind`; -1 means all events."""

    async def refuse(_: IdempotentRequest) -> StartedRun:
        raise bad_field("stream", "stream: the events of this response are not kept any more; leave it out")

    replay = await context.runs.replay(retry, refuse)
    assert isinstance(replay.encoder, ResponseEncoder)
    replay.encoder.behind = behind
    return EventStream(replay, replay, context)


async def count(request: Request) -> Response:
    """Count the tokens of the prompt that a response with the same body would have."""
    wanted, _ = await _read(request)
    num_tokens = sum(map(len, await wanted.read_prompts()))
    wanted.context.admission.charge(request.scope[KEY], num_tokens)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens}, is_private=True)


async def retrieve(request: Request) -> Response:
    """Return a stored response, or the events of a response that runs in the background."""
    _check_query(request, _READING)
    query = request.query_params
    stream, behind = query.get("stream", "false"), query.get("starting_after", "")
    if stream not in ("true", "false"):
        raise bad_field("stream", f"stream is {stream[:32]!r}; give true or false")
    if behind and not (behind.isascii() and behind.isdigit() and len(behind) < 10 and stream == "true"):
        raise bad_field("starting_after", f"starting_after is {behind[:32]!r}; give an event's number, with stream")
    if query.get("include_obfuscation", "false") != "false":
        message = "include_obfuscation: this server does not support it; leave it out"
        raise bad_field("include_obfuscation", message, "unsupported_field")
    context, stored = _found(request)
    if stream == "false":
        return json_response(stored.response(), is_private=True)
    if (run := context.background.run_of(tenant_of(request), stored.response_id)) is not None:
        return RunStream(run, context, int(behind or -1))
    retry = context.background.key_of(tenant_of(request), stored.response_id)
    if retry is None:
        raise bad_field("stream", "stream: only the events of a response in the background are kept; leave it out")
    return await _events(context, retry, int(behind or -1))


async def delete(request: Request) -> Response:
    """Delete a stored response, and end it if it still runs. Responses that continue it remain."""
    context, stored = _found(request)
    await context.background.cancel(tenant_of(request), stored.response_id)
    context.responses.delete(tenant_of(request), stored.response_id)
    return json_response({"id": stored.response_id, "object": "response", "deleted": True}, is_private=True)


async def list_input_items(request: Request) -> Response:
    """List the items that a stored response answered: its input and all earlier items."""
    _check_query(request, _LISTING)
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MAX_LISTED):
        raise bad_field("limit", f"limit is {limit[:32]!r}; give 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise bad_field("order", f"order is {order[:32]!r}; give asc or desc")
    _, stored = _found(request)
    lists = stored.history()[:-1]  # without the response's own output

    def page() -> bytes:
        items = [item for each in lists for item in msgspec.json.decode(each)]
        return msgspec.json.encode(_page(items if order == "asc" else items[::-1], int(limit), after))

    size = sum(map(len, lists))
    return json_response(page() if size <= OFF_LOOP_BYTES else await parse_off_loop(page, size), is_private=True)


async def cancel(request: Request) -> Response:
    """End a response that runs in the background. A response that has ended does not change."""
    context, stored = _found(request)
    if not msgspec.json.decode(stored.rest)["background"]:
        message = "only a response that runs in the background can be cancelled; end others by closing their connection"
        raise ApiError(400, message, code="invalid_request")
    await context.background.cancel(tenant_of(request), stored.response_id)
    return json_response(context.responses.get(tenant_of(request), stored.response_id).response(), is_private=True)


def _page(items: list[dict[str, object]], limit: int, after: str | None) -> dict[str, object]:
    begin = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            shown = after[:MAX_ITEM_ID_CHARACTERS]
            raise bad_field("after", f"after is {shown!r}; give the id of one of the response's input items")
        begin = places[0] + 1
    shown_items = items[begin : begin + limit]
    return {
        "object": "list",
        "data": shown_items,
        "first_id": shown_items[0]["id"] if shown_items else "",
        "last_id": shown_items[-1]["id"] if shown_items else "",
        "has_more": len(items) > begin + limit,
    }


def _check_query(request: Request, known: Collection[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise bad_field(name[:64], f"{name[:64]} is not a parameter that this endpoint knows", "unknown_field")


async def compact(request: Request) -> Response:
    """Answer 404. Without this route, "compact" would be read as a response's id."""
    raise ApiError(404, f"no endpoint at {request.url.path!r}: conversations are not compacted here", code="not_found")


def _found(request: Request) -> tuple[Context, Stored]:
    context = context_of(request)
    return context, context.responses.get(tenant_of(request), request.path_params["response_id"])


def _schema() -> dict[str, object]:
    """Return the body's schema, without the inherited fields that this endpoint does not accept."""
    schema = inline_schema(ResponsesBody)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    left_out = (*NOT_HERE, "stream_options")
    return {**schema, "properties": {name: each for name, each in properties.items() if name not in left_out}}


_NOTES = field_notes({**REFUSED_RESPONSES, **NOT_HERE}, IGNORED_RESPONSES)
_PATH = "/v1/responses"
_ONE = "/v1/responses/{response_id}"
ENDPOINTS = [
    queued(_PATH, create, _schema(), "Answer a conversation of items.", _RETRIES, _NOTES),
    Endpoint("POST", f"{_PATH}/input_tokens", count, body=_schema()),
    Endpoint("POST", f"{_PATH}/compact", compact, is_documented=False),
    Endpoint("GET", _ONE, retrieve, limit=Limit.RATE_WITH_QUERY),  # a poll has no query; a stream has one
    Endpoint("DELETE", _ONE, delete, limit=Limit.NONE),
    Endpoint("GET", f"{_ONE}/input_items", list_input_items),
    Endpoint("POST", f"{_ONE}/cancel", cancel, limit=Limit.NONE),
]
