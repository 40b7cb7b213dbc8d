"""Bodies of /v1/messages and /v1/messages/count_tokens: fields, turns and content blocks.

Owns: their types and bounds. Does not: translate bodies (requests does).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from octavo.server.api.completions.bodies import MAX_MESSAGES
from octavo.server.api.fields import Body, Refused, read, reject_unsupported, reject_unsupported_in, validate
from octavo.server.api.sampling import MAX_STOP_CHARACTERS, MAX_STOPS, MESSAGES_NAMES, ServedFields, with_numbers
from octavo.server.api.tools import drop_hosted_tools
from octavo.server.http.errors import NO_THREADS, bad_field

MAX_SYSTEM_BLOCKS = 256
_ANTHROPICS_OWN = ("temperature", "top_k", "top_p")
_OUR_OWN = "an addition of this server"

REFUSED_MESSAGES: Refused = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "thread": (),  # _refuse_thread refuses it
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
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks before it answers, if its template has that choice."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Body):
    """A JSON schema that the answer's text obeys."""

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(Body):
    """Options for the answer's text."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


@with_numbers(MESSAGES_NAMES, lambda name: None if name in _ANTHROPICS_OWN else _OUR_OWN)
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
    tools: list[AnthropicTool] = Field([])
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    seed: int | None = Field(None, description=_OUR_OWN)


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens. Fields that do not change the prompt are accepted without effect."""

    max_tokens: int = 1


def read_messages(fields: dict[str, object]) -> MessagesBody:
    """Check all fields but the content of messages. Raises ApiError naming the field."""
    return validate(MessagesBody, _supported(fields, MessagesBody))


def read_count(fields: dict[str, object]) -> CountBody:
    """Check the fields of a body whose tokens are only counted. Raises ApiError naming the field."""
    return validate(CountBody, _supported(fields, CountBody))


def _supported(fields: dict[str, object], body: type[MessagesBody]) -> dict[str, object]:
    _refuse_thread(fields)
    kept = reject_unsupported(fields, REFUSED_MESSAGES, body, ignored=IGNORED_MESSAGES)
    tools, thinking, output, choice = (kept.get(name) for name in ("tools", "thinking", "output_config", "tool_choice"))
    if isinstance(tools, list):
        mode = "required" if isinstance(choice, dict) and choice.get("type") == "any" else choice
        usable = drop_hosted_tools(tools, ("custom",), mode)
        kept["tools"] = [
            reject_unsupported_in(tool, {}, AnthropicTool, f"tools[{i}].", _IGNORED_TOOL) for i, tool in usable
        ]
    if isinstance(thinking, dict):
        kept["thinking"] = reject_unsupported(thinking, {}, Thinking, "thinking.", _IGNORED_THINKING)
    if isinstance(output, dict):
        kept["output_config"] = reject_unsupported(output, {}, OutputConfig, "output_config.")
    if isinstance(choice, dict):
        kept["tool_choice"] = reject_unsupported(choice, {}, AnthropicToolChoice, "tool_choice.")
    return kept


def _refuse_thread(fields: dict[str, object]) -> None:
    """Refuse `thread`, so that Anthropic's tool runners send whole conversations instead."""
    if fields.get("thread") is not None:
        message = "thread: this server keeps no conversations; leave it out, and send all messages"
        raise bad_field("thread", message, NO_THREADS)


MAX_BLOCK_ID_CHARACTERS = 256
IGNORED_BLOCK: Mapping[str, str] = {
    "cache_control": IGNORED_MESSAGES["cache_control"],
    "signature": "thinking is not signed here, and what was is taken as it is",
    "caller": "tools are called by the model alone",
    "toolset_name": "there are no sets of tools",
}
_REFUSED_BLOCK: Refused = {"citations": ([], {"enabled": False})}
_KINDS = ("server_tool_use", "container_upload", "tool_reference", "browser_state", "compaction")


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """The model's thinking in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Body):
    """Encrypted thinking of another server's model. It is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_BLOCK_ID_CHARACTERS)
    name: str
    input: dict[str, object]


class ToolResultBlock(Body):
    """The result of a call: text, or blocks of text."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_BLOCK_ID_CHARACTERS)
    content: str | list[Any] = ""
    is_error: bool = False


class ImageSource(Body):
    """An image: base64 with its media type, or a URL."""

    type: Literal["base64", "url"]
    media_type: str = Field("", max_length=64)
    data: str = ""
    url: str = ""


class ImageBlock(Body):
    """An image, for models that take images."""

    type: Literal["image"]
    source: ImageSource

    @property
    def address(self) -> str:
        """The image as a URL."""
        source = self.source
        return source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"


class DocumentBlock(Body):
    """A text document."""

    type: Literal["document"]
    source: dict[str, object]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Body):
    """A search result with its text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[Any]


class TextSource(Body):
    """A document's text, as a part of the request."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = ""
    content: str | list[Any] = ""


@dataclass(slots=True)
class BlockText:
    """The text of a block of any text kind. Making one takes a tenth of the time of a validated block."""

    text: str


Block = BlockText | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: Mapping[str, type[Body]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
TEXTS = ("text", "document", "search_result")
_ALLOWED: Mapping[str, Collection[str]] = {
    "system": ("text",),
    "user": (*TEXTS, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class MessageTurn(Body):
    """One message. `read_blocks` reads its content."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


def read_turn(value: dict[str, Any], where: str, takes_images: bool = False) -> tuple[str, list[Block]]:
    """Return the role and blocks of one message; documents and search results become text. Raises ApiError."""
    role, content = value.get("role"), value.get("content")
    if isinstance(role, str) and role in _ALLOWED and isinstance(content, str | list) and len(value) == 2:
        return role, read_blocks(content, f"{where}content", _allowed(role, takes_images))
    turn = read(MessageTurn, value, {}, where=where)
    return turn.role, read_blocks(turn.content, f"{where}content", _allowed(turn.role, takes_images))


def _allowed(role: str, takes_images: bool) -> Collection[str]:
    return (*_ALLOWED[role], "image") if takes_images and role == "user" else _ALLOWED[role]


def read_blocks(content: str | list[Any], where: str, allowed: Collection[str]) -> list[Block]:
    """Return the checked blocks, all of allowed kinds. Raises ApiError naming the block."""
    if isinstance(content, str):
        return [BlockText(content)] if content else []
    found: list[Block] = []
    for index, value in enumerate(content):
        block = _read_block(value, f"{where}[{index}]", allowed)
        if isinstance(block, BlockText | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock):
            found.append(block)
        else:
            found.append(BlockText(_text_of(block, f"{where}[{index}].")))
    return found


def texts(content: str | list[Any], where: str) -> str:
    """Return the text of blocks that must all be text, joined by newlines. Raises ApiError naming the block."""
    return "\n".join(block.text for block in read_blocks(content, where, TEXTS) if isinstance(block, BlockText))


def _read_block(value: object, where: str, allowed: Collection[str]) -> Body | BlockText:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise bad_field(where, f"{where} is no content block; give an object with a type")
    if kind == "image" and kind not in allowed:
        message = f"{where}.type is 'image'; this server does not accept images here, give text"
        raise bad_field(f"{where}.type", message, "unsupported_field")
    if kind in _KINDS or kind.endswith("_tool_result"):
        message = f"{where}.type is {kind[:64]!r}; this server runs no tools itself, leave it out"
        raise bad_field(f"{where}.type", message, "unsupported_field")
    if kind not in allowed:
        message = f"{where}.type is {kind[:64]!r}; blocks here may be: {', '.join(allowed)}"
        raise bad_field(f"{where}.type", message)
    text = value.get("text")
    if kind == "text" and isinstance(text, str) and len(value) - ("cache_control" in value) == 2:
        return BlockText(text)  # most blocks are of this form
    model = _BLOCKS[kind]
    return read(model, value, _REFUSED_BLOCK, IGNORED_BLOCK, f"{where}.")


def _text_of(block: Body, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join((block.title, block.source, texts(block.content, f"{where}content")))
    assert isinstance(block, DocumentBlock)
    if block.source.get("type") not in ("text", "content"):
        message = f"{where}source.type is {str(block.source.get('type'))[:64]!r}; documents may be text only"
        raise bad_field(f"{where}source.type", message, "unsupported_field")
    source = read(TextSource, block.source, {}, where=f"{where}source.")
    text = source.data if source.type == "text" else texts(source.content, f"{where}source.content")
    return "\n".join(part for part in (block.title, block.context, text) if part)
