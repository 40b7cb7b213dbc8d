"""ChatBody: what POST /v1/chat/completions takes, and what other conversations are translated to.

Owns: messages and the fields around them. Does not: render or parse anything.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, FailFast, Field

from octavo.server.bodies.checks import Body, Refused, sift, sift_if_object, validate
from octavo.server.bodies.sampling import REFUSED_BOTH, SamplingBody, sift_stream_options

MAX_MESSAGES = 2048

REFUSED_CHAT: Refused = {
    **REFUSED_BOTH,
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "prompt_cache_options": (),
}
_REFUSED_MESSAGE: Refused = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}


def _parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Body):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. `developer` is shown to the model as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, one below the other."""
        return "\n".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] = Field({})
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def read_chat(fields: dict[str, object]) -> ChatBody:
    """Check a chat body. Raises ApiError naming the field."""
    fields = sift_stream_options(sift(fields, REFUSED_CHAT, ChatBody))
    messages = fields.get("messages")
    if isinstance(messages, list):
        messages = messages[: MAX_MESSAGES + 1]
        fields["messages"] = [
            sift_if_object(m, _REFUSED_MESSAGE, Message, f"messages[{i}].") for i, m in enumerate(messages)
        ]
    return validate(ChatBody, fields)
