"""From a conversation to what is to be answered, whichever interface it came through.

Owns: the task of a ChatBody. Does not: know how the answer looks (its form's kind says it) or submit anything.
"""

from __future__ import annotations

from octavo.server.bodies.chat import ChatBody
from octavo.server.context import Context
from octavo.server.grammars import structure_of
from octavo.server.params import read_params
from octavo.server.reply import Task, wants_usage
from octavo.server.shapes.form import Form
from octavo.server.shapes.shape import Identity

Facts = dict[str, object]


async def chat_task(
    context: Context, body: ChatBody, form: str = "chat", id_prefix: str = "chatcmpl", facts: Facts | None = None
) -> Task:
    """What answers a conversation in the given form; `facts` are what that form needs besides. Raises ApiError."""

    async def read_prompts() -> list[list[int]]:
        return [await context.prompts.chat(body)]

    def make_form(identity: Identity, num_prompt_tokens: int) -> Form:
        return Form(form, identity, wants_usage(body), facts={"num_prompt_tokens": num_prompt_tokens, **(facts or {})})

    return Task(
        kind=id_prefix,
        body=body,
        params=await read_params(body, context.params.chat),
        num_prompts=1,
        num_characters=sum(len(part.text) for message in body.messages for part in message.content),
        num_ids=0,
        prompt_param="messages",
        read_prompts=read_prompts,
        make_form=make_form,
        read_grammar=context.grammars.reader(structure_of(body)),
        can_continue=form == "chat",
    )
