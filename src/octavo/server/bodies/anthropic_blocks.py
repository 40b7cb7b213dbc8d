"""Turns of an Anthropic conversation: their content blocks, checked.

Owns: which kinds of block there are, what each holds, which are refused. Does not: translate them.
Invariant: a block is taken in full, or refused by its place and kind; what is ignored is in IGNORED_BLOCK.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from octavo.server.bodies.anthropic import IGNORED_MESSAGES
from octavo.server.bodies.checks import Body, Refused, sift, validate
from octavo.server.faults import bad_field

MAX_BLOCK_ID_CHARACTERS = 256
IGNORED_BLOCK: Mapping[str, str] = {
    "cache_control": IGNORED_MESSAGES["cache_control"],
    "signature": "thinking is not signed here, and what was is taken as it is",
    "caller": "tools are called by the model alone",
    "toolset_name": "there are no sets of tools",
}
_REFUSED_BLOCK: Refused = {"citations": ([], {"enabled": False})}
_KINDS = ("image", "server_tool_use", "container_upload", "tool_reference", "browser_state", "compaction")


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Body):
    """Thoughts that only their author can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_BLOCK_ID_CHARACTERS)
    name: str
    input: dict[str, object]


class ToolResultBlock(Body):
    """What a call gave: text, or blocks that are texts."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_BLOCK_ID_CHARACTERS)
    content: str | list[Any] = ""
    is_error: bool = False


class DocumentBlock(Body):
    """A document of text."""

    type: Literal["document"]
    source: dict[str, object]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Body):
    """A piece of text that was found somewhere."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[Any]


class TextSource(Body):
    """Where a document's text is: in the request."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = ""
    content: str | list[Any] = ""


@dataclass(slots=True)
class Said:
    """A text, however it came: a conversation is made of these, which take a tenth of a checked block's time."""

    text: str


Block = Said | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: Mapping[str, type[Body]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_TEXTS = ("text", "document", "search_result")
_ALLOWED: Mapping[str, Collection[str]] = {
    "system": ("text",),
    "user": (*_TEXTS, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class MessageTurn(Body):
    """One message; its content is read by `read_blocks`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


def read_turn(value: dict[str, Any], where: str) -> tuple[str, list[Block]]:
    """The role and the blocks of one message, each document and search result as its text. Raises ApiError."""
    role, content = value.get("role"), value.get("content")
    if isinstance(role, str) and role in _ALLOWED and isinstance(content, str | list) and len(value) == 2:
        return role, read_blocks(content, f"{where}content", _ALLOWED[role])
    turn = validate(MessageTurn, sift(value, {}, MessageTurn, where), where)
    return turn.role, read_blocks(turn.content, f"{where}content", _ALLOWED[turn.role])


def read_blocks(content: str | list[Any], where: str, allowed: Collection[str]) -> list[Block]:
    """Check blocks, of which only the allowed kinds may be here. Raises ApiError naming the place."""
    if isinstance(content, str):
        return [Said(content)] if content else []
    found: list[Block] = []
    for index, value in enumerate(content):
        block = _read_block(value, f"{where}[{index}]", allowed)
        if isinstance(block, Said | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock):
            found.append(block)
        else:
            found.append(Said(_text_of(block, f"{where}[{index}].")))
    return found


def texts(content: str | list[Any], where: str) -> str:
    """What may only be text, one block below the other. Raises ApiError naming the place."""
    return "\n".join(block.text for block in read_blocks(content, where, _TEXTS) if isinstance(block, Said))


def _read_block(value: object, where: str, allowed: Collection[str]) -> Body | Said:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise bad_field(where, f"{where} is no content block; give an object with a type")
    if kind in _KINDS or kind.endswith("_tool_result"):
        message = f"{where}.type is {kind[:64]!r}; this model takes text only, and this server runs no tools"
        raise bad_field(f"{where}.type", message, "unsupported_field")
    if kind not in allowed:
        message = f"{where}.type is {kind[:64]!r}; blocks here may be: {', '.join(allowed)}"
        raise bad_field(f"{where}.type", message)
    text = value.get("text")
    if kind == "text" and isinstance(text, str) and len(value) - ("cache_control" in value) == 2:
        return Said(text)  # what most blocks are
    model = _BLOCKS[kind]
    return validate(model, sift(value, _REFUSED_BLOCK, model, f"{where}.", IGNORED_BLOCK), f"{where}.")


def _text_of(block: Body, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join((block.title, block.source, texts(block.content, f"{where}content")))
    assert isinstance(block, DocumentBlock)
    if block.source.get("type") not in ("text", "content"):
        message = f"{where}source.type is {str(block.source.get('type'))[:64]!r}; documents may be text only"
        raise bad_field(f"{where}source.type", message, "unsupported_field")
    source = validate(TextSource, sift(block.source, {}, TextSource, f"{where}source."), f"{where}source.")
    text = source.data if source.type == "text" else texts(source.content, f"{where}source.content")
    return "\n".join(part for part in (block.title, block.context, text) if part)
