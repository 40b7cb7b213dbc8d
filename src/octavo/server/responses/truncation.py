"""Truncation: the end of a conversation that fits, where a client asks for it instead of a refusal.

Owns: which messages are left out. Does not: render or count (PromptReader does).
Invariants: the system messages at the beginning and the last turn of the user stay; what stays begins with a turn of
the user, so that no result is shown without its call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.faults import ApiError

if TYPE_CHECKING:
    from octavo.server.api.completions.bodies import ChatBody
    from octavo.server.context import Context

ANSWER_SHARE = 8  # one part in so many of the model's length is for the answer, where nobody says how long it may be
_SYSTEM = ("system", "developer")


async def fitted(context: Context, body: ChatBody) -> ChatBody:
    """The body without its oldest turns, as few as must go; as it is, where nothing helps. Raises ApiError.

    Each try renders and tokenizes the conversation: at most 12 for 2,048 messages.
    """
    reserved = body.max_completion_tokens or context.max_model_len // ANSWER_SHARE
    room = context.max_model_len - max(1, reserved)
    if await _fits(context, body, room):
        return body
    head = next((i for i, message in enumerate(body.messages) if message.role not in _SYSTEM), len(body.messages))
    starts = [i for i, message in enumerate(body.messages) if i > head and message.role == "user"]
    low, high = 0, len(starts)  # the first of `starts` that fits is in [low, high]
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
        return len(await context.prompts.chat(body)) <= room
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
