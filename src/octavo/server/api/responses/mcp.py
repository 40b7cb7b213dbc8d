"""Tools of MCP servers in /v1/responses: the client's field, the tools that it allows, and the response's rounds.

Owns: which tools a request may use; the rounds of a response, in which the model calls tools and this server makes the
calls; the events of these responses. Does not: talk to MCP servers (octavo.mcp does), or translate items (bodies does).
Invariants: only servers of the operator's settings are used, and of their tools those that the client allows. No call
that needs approval is made without it. A response makes at most `max_tool_calls` calls. A server that fails ends in an
item with an error; the response goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain, count
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import convert
from pydantic import Field
from starlette.requests import Request

from octavo.core.request import FinishReason
from octavo.errors import OctavoError
from octavo.mcp import MAX_RESULT_CHARACTERS, McpError, McpTool, function_names, read_arguments
from octavo.server.api.fields import Body, Refused
from octavo.server.api.responses.answers import ResponseEncoder, ServerTool
from octavo.server.api.responses.store import DetachedRun
from octavo.server.generation import Generation, GenerationRequest, start
from octavo.server.http.errors import (
    ApiError,
    bad_field,
    cancelled_error,
    draining_error,
    from_exception,
    internal_error,
)
from octavo.server.http.middleware import ARRIVAL
from octavo.server.reply import AnswerStream
from octavo.text.answer_format import AnswerFormat

if TYPE_CHECKING:
    from starlette.types import Send

    from octavo.server.context import Context
    from octavo.server.encoding import Json

MAX_SERVER_CALLS = 128  # of one response
DEFAULT_CALLS = 16
_OWN_SERVERS = "; only the operator of this server names MCP servers (octavo serve --mcp)"
REFUSED_MCP: Refused = {
    "connector_id": (),
    "tunnel_id": (),
    "headers": ({},),
    "authorization": (),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}
IGNORED_MCP = {"server_description": "the tools have descriptions"}
_OF_CLIENT = ("function_call", "mcp_approval_request")  # items that the client must answer
ItemId = Annotated[str, Field(min_length=1, max_length=128)]
_log = logging.getLogger(__name__)


class ToolFilter(Body):
    """Tools by name, or those that change nothing."""

    tool_names: list[str] | None = Field(None, max_length=128)
    read_only: bool | None = None

    def takes(self, tool: McpTool) -> bool:
        """Return True if all conditions hold."""
        is_named = self.tool_names is None or tool.name in self.tool_names
        return is_named and (self.read_only is None or self.read_only == tool.is_read_only)


class ApprovalFilter(Body):
    """The tools that always or never need approval. Those of neither need it."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpServerField(Body):
    """The tools of an MCP server that the operator named `server_label`."""

    type: Literal["mcp"]
    server_label: str = Field(max_length=64)
    server_url: str | None = Field(None, description="left out, or as the operator gave it")
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = Field(None, description="default: always")

    def allows(self, tool: McpTool) -> bool:
        """Return True if the model may see a tool."""
        allowed = self.allowed_tools
        return allowed is None or (tool.name in allowed if isinstance(allowed, list) else allowed.takes(tool))

    def needs_approval(self, tool: McpTool) -> bool:
        """Return True if the client must approve each call of a tool."""
        rule = self.require_approval
        if isinstance(rule, ApprovalFilter):
            is_always = rule.always is not None and rule.always.takes(tool)
            return is_always or rule.never is None or not rule.never.takes(tool)
        return rule != "never"


class McpChoice(Body):
    """A choice of the tools of one MCP server, or of one tool."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class McpItem(Body):
    """An item about tools of MCP servers, as clients send items back."""

    id: ItemId
    server_label: str = Field(max_length=64)


class McpListItem(McpItem):
    """The list of a server's tools, which says nothing to the model: it is shown the tools of this request."""

    type: Literal["mcp_list_tools"]
    tools: list[Any] = Field([])
    error: str | None = None


class McpApprovalRequest(McpItem):
    """A call that waits for the client's approval."""

    type: Literal["mcp_approval_request"]
    name: str
    arguments: str


class McpCallItem(McpItem):
    """A call that was made."""

    type: Literal["mcp_call"]
    name: str
    arguments: str
    approval_request_id: ItemId | None = None
    output: str | None = None
    error: dict[str, Any] | str | None = None


class McpApprovalResponse(Body):
    """The client's answer to an McpApprovalRequest."""

    type: Literal["mcp_approval_response"]
    id: ItemId | None = None
    approval_request_id: ItemId
    approve: bool
    reason: str | None = None


MCP_ITEMS: Mapping[str, tuple[type[Body], Refused]] = {
    "mcp_list_tools": (McpListItem, {}),
    "mcp_call": (McpCallItem, {}),
    "mcp_approval_request": (McpApprovalRequest, {}),
    "mcp_approval_response": (McpApprovalResponse, {}),
}


def plain_items(items: Iterable[Json]) -> Iterator[Json]:
    """Yield the items with those of MCP servers as the model sees them: as calls of functions and their outputs."""
    requests: dict[str, Json] = {}  # by id
    for item in items:
        if item["type"] not in MCP_ITEMS:
            yield item
        elif item["type"] == "mcp_approval_request":
            requests[item["id"]] = item
        elif item["type"] == "mcp_call":
            if item["error"] is not None or item["output"] is not None:  # else it was cut or cancelled
                yield from _as_function(item, item["id"], _result(item))
        elif item["type"] == "mcp_approval_response" and not item["approve"]:
            pending = requests.get(item["approval_request_id"])
            if pending is not None:
                reason = f": {item['reason']}" if item["reason"] else ""
                yield from _as_function(pending, item["id"], f"error: the user declined this call{reason}")


def _as_function(call: Json, call_id: str, output: str) -> Iterator[Json]:
    facts = {"status": "completed", "call_id": call_id}
    yield {"type": "function_call", "name": call["name"], "arguments": call["arguments"], **facts}
    yield {"type": "function_call_output", "output": output, **facts}


def _result(item: Json) -> str:
    """Return the text that the model gets for a call."""
    error = item["error"]
    if error is None:
        return str(item["output"])
    if isinstance(error, dict):
        parts = error.get("content")
        texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict)] if parts else []
        error = "\n".join(texts) or error.get("message", "the call failed")
    return f"error: {error}"


@dataclass(frozen=True, slots=True)
class ServerTools:
    """The tools that a request may use, by the names that the model sees, and the lists of each server's tools."""

    tools: Mapping[str, McpTool] = field(default_factory=dict)
    approvals: Mapping[str, bool] = field(default_factory=dict)
    lists: Sequence[tuple[str, list[Json], str | None]] = ()  # label, tools, error

    def by_name(self) -> dict[str, ServerTool]:
        """Return what the items of the answer need to know."""
        return {name: ServerTool(tool.server, tool.name, self.approvals[name]) for name, tool in self.tools.items()}

    def named(self, choice: McpChoice) -> list[str]:
        """Return the names of the tools that a choice takes."""
        return [
            name
            for name, tool in self.tools.items()
            if tool.server == choice.server_label and choice.name in (None, tool.name)
        ]

    def find(self, label: str, name: str) -> McpTool | None:
        """Return the tool with this name of its own; None if the request may not use it."""
        return next((tool for tool in self.tools.values() if (tool.server, tool.name) == (label, name)), None)


async def find_tools(context: Context, fields: Sequence[tuple[int, McpServerField]], taken: set[str]) -> ServerTools:
    """Return the tools that these fields of a request (with their places in `tools`) allow. Raises ApiError.

    `taken` are the names of the client's own functions.
    """
    specs = context.mcp.specs
    for index, each in fields:
        where, label = f"tools[{index}].server_label", each.server_label
        if label not in specs:
            known = f"its MCP servers are {', '.join(specs)}" if specs else "it has no MCP servers"
            raise bad_field(where, f"{where} is {label!r}, which this server does not know: {known}{_OWN_SERVERS}")
        if each.server_url is not None and each.server_url != specs[label].url:
            where = f"tools[{index}].server_url"
            raise bad_field(where, f"{where} is not the URL of MCP server {label!r}; leave it out{_OWN_SERVERS}")
        if sum(other.server_label == label for _, other in fields) > 1:
            raise bad_field(where, f"two tools have the server_label {label!r}; give one")
    found = await asyncio.gather(*(context.mcp.tools(each.server_label) for _, each in fields), return_exceptions=True)
    lists: list[tuple[str, list[Json], str | None]] = []
    allowed: list[tuple[McpTool, bool]] = []
    for (_, each), tools in zip(fields, found, strict=True):
        if isinstance(tools, McpError):
            _log.warning("%s", tools.full)
            lists.append((each.server_label, [], str(tools)))
        elif isinstance(tools, BaseException):
            raise tools
        else:
            own = [tool for tool in tools if each.allows(tool)]
            lists.append((each.server_label, [_listed(tool) for tool in own], None))
            allowed += [(tool, each.needs_approval(tool)) for tool in own]
    names = function_names([tool for tool, _ in allowed], taken)
    approvals = dict(zip(names, [needs for _, needs in allowed], strict=True))
    return ServerTools(names, approvals, lists)


def _listed(tool: McpTool) -> Json:
    shown = {"name": tool.name, "description": tool.description, "input_schema": dict(tool.schema)}
    return {**shown, "annotations": dict(tool.annotations) or None}


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that the client approved."""

    approval_id: str
    label: str
    name: str
    arguments: str


def approved_calls(items: Sequence[Json], num_own: int, tools: ServerTools) -> list[ApprovedCall]:
    """Return the calls that the last `num_own` items approve and that were not made yet. Raises ApiError."""
    requests = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    made = {item["approval_request_id"] for item in items if item["type"] == "mcp_call"}
    found: list[ApprovedCall] = []
    for index, item in enumerate(items[len(items) - num_own :]):
        if item["type"] != "mcp_approval_response" or item["approval_request_id"] in made:
            continue
        where, request_id = f"input[{index}].approval_request_id", item["approval_request_id"]
        pending = requests.get(request_id)
        if pending is None:
            message = f"{where} is {request_id!r}, which no mcp_approval_request of this conversation has as its id"
            raise bad_field(where, message)
        made.add(request_id)
        if item["approve"]:
            if tools.find(pending["server_label"], pending["name"]) is None:
                message = f"approves a call of {pending['name']!r} of MCP server {pending['server_label']!r}"
                raise bad_field(where, f"{where} {message}, which tools does not allow; give that server in tools")
            found.append(ApprovedCall(request_id, pending["server_label"], pending["name"], pending["arguments"]))
    return found


# Returns the request of a round. The arguments: its number, the output so far, whether tools of servers may be called,
# and the number of tokens that earlier rounds generated.
NextRound = Callable[[int, Sequence["Json"], bool, int], Awaitable[GenerationRequest]]


@dataclass(kw_only=True)
class McpPlan:
    """What a response with tools of MCP servers begins with.

    `shown` are the servers whose lists of tools the conversation has. `max_tokens` bounds the tokens of all rounds.
    """

    tools: ServerTools
    approved: Sequence[ApprovedCall]
    shown: Collection[str]
    max_calls: int
    max_tokens: int | None
    next_round: NextRound


class McpRun:
    """One response: rounds of an answer and the calls in it, made by a task, and its events so far.

    With `is_detached` it continues without readers. `failure` is the error of a failed response.
    """

    unread_bytes = 0  # the events are kept until the end anyway

    def __init__(self, request: Request, context: Context, plan: McpPlan) -> None:
        self.name = ""
        self.events: list[bytes] = []  # the index is the event's number
        self.is_detached = False
        self.failure: ApiError | None = None
        self.is_over = False
        self.encoder: ResponseEncoder  # set by start
        self._request = request
        self._context = context
        self._plan = plan
        self._generation: Generation | None = None
        self._num_calls = 0
        self._response: Json = {}
        self._why: ApiError | None = None  # it was cancelled
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Submit the first round, unless calls precede it, and start the task. Raises ApiError."""
        wanted = await self._plan.next_round(0, [], True, 0)
        self.name = wanted.name or ""
        identity = (self.name, int(time.time()), wanted.body.model or self._context.models[0])
        self.encoder = ResponseEncoder(wanted.answer_spec(identity), self._context.text.tokenizer)
        self.encoder.items.server_tools = self._plan.tools.by_name()
        if not self._plan.approved:
            self._generation = await self._begin(wanted)
        self._task = asyncio.create_task(self._run())

    async def read(self, behind: int, quiet_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the events after event number `behind` until the end, and b"" after `quiet_s` without any."""
        number = behind + 1
        while True:
            if number < len(self.events):
                part, number = b"".join(self.events[number:]), len(self.events)
                yield part
            elif self.is_over:
                return
            else:
                self._changed.clear()  # other readers that wait were woken when it was set
                try:
                    async with asyncio.timeout(quiet_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield b""

    async def finished(self) -> Json:
        """Wait for the end and return the response. Raises ApiError if it failed."""
        assert self._task is not None
        await asyncio.wait((self._task,))
        if self.failure is not None:
            raise self.failure
        return self._response

    def cancel(self, why: ApiError) -> None:
        """End the response with this error."""
        assert self._task is not None
        self._why = self._why or why
        # In the next iteration: a task that is cancelled before its start would tell no reader.
        asyncio.get_running_loop().call_soon(self._task.cancel)

    async def close(self) -> None:
        """End the response, unless it is detached: its reader has left. Idempotent."""
        if not self.is_detached and self._task is not None:
            if not self.is_over:
                self.cancel(cancelled_error())
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        failure: ApiError | None = internal_error()
        try:
            is_cut = await self._rounds()
            last, self._response = self.encoder.end(is_cut)
            self._push(last)
            failure = None
        except (ApiError, OctavoError) as error:
            failure = from_exception(error)
        except asyncio.CancelledError:
            failure = self._why or draining_error()
        except Exception:  # one failure ends only this response; the log has the details
            _log.exception("response %s failed", self.name)
        finally:
            if self._generation is not None:
                await self._generation.close()
            if failure is not None:
                for item in self.encoder.items.output:
                    if item["type"] == "mcp_call" and item["status"] == "in_progress":
                        item["status"] = "incomplete"
                self._push(self.encoder.stream_format.error(failure))
            self.failure, self.is_over = failure, True
            self._changed.set()

    async def _rounds(self) -> bool:
        """Run all rounds; return True if the last one was cut by the bound on tokens."""
        plan, encoder, items = self._plan, self.encoder, self.encoder.items
        self._push(encoder.head)
        for label, tools, error in plan.tools.lists:
            if label not in plan.shown:
                self._push(encoder.encode(items.add_list(label, tools, error)))
        for call in plan.approved:
            tool = ServerTool(call.label, call.name, needs_approval=True)
            opened = items.open_call(tool, call.approval_id)
            self._push(encoder.encode(chain(opened, items.add_arguments(call.arguments), items.close("completed"))))
            await self._call(items.output[-1])
        for number in count():
            num_tokens = sum(usage.completion_tokens for usage in encoder.usages)
            if plan.max_tokens is not None and num_tokens >= plan.max_tokens:
                return True
            if self._generation is None:
                may_call = self._num_calls < plan.max_calls
                wanted = await plan.next_round(number, items.output, may_call, num_tokens)
                self._generation = await self._begin(wanted)
            first = len(items.output)
            is_cut = await self._answer(self._generation)
            self._generation = None
            made = items.output[first:]
            calls = [item for item in made if item["type"] == "mcp_call" and item["status"] == "in_progress"]
            for item in calls:
                await self._call(item)
            if is_cut or not calls or any(item["type"] in _OF_CLIENT for item in made):
                return is_cut
        raise AssertionError("unreachable")

    async def _begin(self, wanted: GenerationRequest) -> Generation:
        """Submit a round. Its times count from now, without those of calls."""
        scope = {**self._request.scope, ARRIVAL: time.monotonic()} if self.events else self._request.scope
        generation, spec = await start(Request(scope, self._request.receive), wanted)
        self.encoder.begin_round(convert(spec.facts.get("format"), AnswerFormat | None))
        return generation

    async def _answer(self, generation: Generation) -> bool:
        """Encode a round's answer; return True if it was cut."""
        reason: FinishReason | None = None
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for index, delta in deltas:
                    self._push(self.encoder.chunk(index, delta))
                    reason = delta.finish_reason
        finally:
            await generation.close()
        return reason is FinishReason.LENGTH

    async def _call(self, item: Json) -> None:
        """Make a call and end its item."""
        label, name, plan = item["server_label"], item["name"], self._plan
        output: str | None = None
        error: Json | None = None
        self._num_calls += 1
        try:
            tool = plan.tools.find(label, name)
            if tool is None or self._num_calls > plan.max_calls:
                raise McpError(f"not called: max_tool_calls is {plan.max_calls}")
            most = min(MAX_RESULT_CHARACTERS, self._context.max_model_len)
            result = await self._context.mcp.call(tool, read_arguments(item["arguments"]), most)
            if result.is_error:
                error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": result.text}]}
            else:
                output = result.text
        except McpError as failure:
            if failure.detail:
                _log.warning("%s", failure.full)
            error = {"type": "mcp_protocol_error", "code": failure.code, "message": str(failure)}
        self._push(self.encoder.encode(self.encoder.items.end_call(item, output, error)))

    def _push(self, events: bytes) -> None:
        self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self._changed.set()


class RunStream(AnswerStream):
    """The response that streams the events of an McpRun, after event number `behind`."""

    def __init__(self, run: DetachedRun, context: Context, behind: int = -1) -> None:
        super().__init__(run, run.encoder, context)
        self._run = run
        self._behind = behind

    async def _write_all(self, send: Send) -> None:
        async with aclosing(self._run.read(self._behind, self._limits.keep_alive_s)) as parts:
            async for part in parts:
                await self._write(send, part or self._format.keep_alive)
        if self._run.failure is not None:
            self._note(self._run.failure.code)
