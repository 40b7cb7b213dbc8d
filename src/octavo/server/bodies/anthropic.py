"""MessagesBody: what POST /v1/messages and /v1/messages/count_tokens take.

Owns: the fields around the messages. Does not: know blocks (anthropic_blocks does), or translate anything.
The names follow Anthropic's public API reference and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from octavo.server.bodies.chat import MAX_MESSAGES
from octavo.server.bodies.checks import Body, Refused, sift, sift_if_object, validate
from octavo.server.bodies.sampling import MAX_STOP_CHARACTERS, MAX_STOPS
from octavo.server.bodies.served import ServedFields
from octavo.server.bodies.tools import without_hosted
from octavo.server.faults import NO_THREADS, bad_field

MAX_SYSTEM_BLOCKS = 256
_OUR_OWN = "an addition of this server"

REFUSED_MESSAGES: Refused = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "thread": (),  # by _refuse_thread
}
IGNORED_MESSAGES: Mapping[str, str] = {
    "metadata": "nothing is stored, so there is nothing to label",
    "service_tier": "there is one tier; priorities belong to keys",
    "cache_control": "prefixes are found by their content, here and in every block",
    "context_management": "nothing is taken out of a conversation",
    "diagnostics": "answers carry none",
    "betas": "there are no versions to ask for; the header anthropic-beta is ignored too",
    "billing_policy": "nothing is billed",
    "user_profile_id": "nothing here depends on it",
    "workspace_id": "there are no workspaces",
}
_IGNORED_TOOL: Mapping[str, str] = {
    "cache_control": IGNORED_MESSAGES["cache_control"],
    "eager_input_streaming": "arguments are always streamed as they come",
    "input_examples": "templates have no place for them",
}
_IGNORED_THINKING: Mapping[str, str] = {
    "budget_tokens": "thinking counts towards max_tokens, and has no budget of its own",
}


class AnthropicTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, object]
    strict: bool | None = None


class AnthropicToolChoice(Body):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks before it answers, where its template leaves the choice."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Body):
    """A schema that the answer's text obeys."""

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer's text is made."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessagesBody(ServedFields):
    """POST /v1/messages."""

    max_tokens: int
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="turns of `user`, `assistant` and `system` with text or blocks: `text`, `thinking`, `tool_use`, "
        "`tool_result`, `document` and `search_result` of text",
    )
    system: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_SYSTEM_BLOCKS)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]] = Field(
        [], max_length=MAX_STOPS
    )
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[AnthropicTool] = Field([])
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    min_p: float | None = Field(None, description=_OUR_OWN)
    seed: int | None = Field(None, description=_OUR_OWN)


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens; what does not change the prompt may be there, and changes nothing."""

    max_tokens: int = 1


def read_messages(fields: dict[str, object]) -> MessagesBody:
    """Check the fields around the messages. Raises ApiError naming the field."""
    return validate(MessagesBody, _sifted(fields, MessagesBody))


def read_count(fields: dict[str, object]) -> CountBody:
    """Check the fields around messages that are only counted. Raises ApiError naming the field."""
    return validate(CountBody, _sifted(fields, CountBody))


def _sifted(fields: dict[str, object], body: type[MessagesBody]) -> dict[str, object]:
    _refuse_thread(fields)
    kept = sift(fields, REFUSED_MESSAGES, body, ignored=IGNORED_MESSAGES)
    tools, thinking, output, choice = (kept.get(name) for name in ("tools", "thinking", "output_config", "tool_choice"))
    if isinstance(tools, list):
        mode = "required" if isinstance(choice, dict) and choice.get("type") == "any" else choice
        usable = without_hosted(tools, "custom", mode)
        kept["tools"] = [sift_if_object(tool, {}, AnthropicTool, f"tools[{i}].", _IGNORED_TOOL) for i, tool in usable]
    if isinstance(thinking, dict):
        kept["thinking"] = sift(thinking, {}, Thinking, "thinking.", _IGNORED_THINKING)
    if isinstance(output, dict):
        kept["output_config"] = sift(output, {}, OutputConfig, "output_config.")
    if isinstance(choice, dict):
        kept["tool_choice"] = sift(choice, {}, AnthropicToolChoice, "tool_choice.")
    return kept


def _refuse_thread(fields: dict[str, object]) -> None:
    """Refuse a conversation kept by the server so that Anthropic's tool runners send the whole one instead."""
    if fields.get("thread") is not None:
        message = "thread: this server keeps no conversations; leave it out, and send all messages"
        raise bad_field("thread", message, NO_THREADS)
