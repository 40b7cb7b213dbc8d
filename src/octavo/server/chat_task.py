"""From a conversation to what is to be answered, whichever interface it came through.

Owns: the task of a ChatBody. Does not: know how the answer looks (its form's kind says it) or submit anything.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.server.answer_formats import TAIL_IDS, format_fact, format_of, shown_ids
from octavo.server.bodies.chat import ChatBody
from octavo.server.call_grammars import read_grammar
from octavo.server.context import Context
from octavo.server.params import read_params
from octavo.server.reply import Task, answer_facts, wants_usage
from octavo.server.shapes.form import Form
from octavo.server.shapes.shape import Identity

Facts = dict[str, object]


async def chat_task(
    context: Context, body: ChatBody, form: str = "chat", id_prefix: str = "chatcmpl", facts: Facts | None = None
) -> Task:
    """What answers a conversation in the given form; `facts` are what that form needs besides. Raises ApiError.

    The form's facts also hold how its parts are told apart (answer_formats.read_format).
    """
    tokenizer = context.text.tokenizer
    prompt: list[int] = []

    async def read_prompts() -> list[list[int]]:
        prompt[:] = await context.prompts.chat(body, params.num_kept(context.max_model_len))
        return [prompt]

    def prompt_end() -> str:
        has_reasoning = context.dialect.reasoning is not None
        return tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False) if has_reasoning else ""

    def make_form(identity: Identity, num_prompt_tokens: int) -> Form:
        answer_format = format_fact(format_of(context.dialect, body, prompt_end()))
        shared = answer_facts(body, [prompt])
        own = {"num_prompt_tokens": num_prompt_tokens, **answer_format, **shared, **(facts or {})}
        return Form(form, identity, wants_usage(body), facts=own)

    params = await read_params(body, context.params.chat)
    shown = shown_ids(context.dialect, body, tokenizer)
    return Task(
        kind=id_prefix,
        body=body,
        params=replace(params, shown_special_ids=shown) if shown else params,
        num_prompts=1,
        num_characters=sum(message.num_characters for message in body.messages)
        + sum(tool.num_characters for tool in body.usable_tools),
        num_ids=0,
        prompt_param="messages",
        read_prompts=read_prompts,
        make_form=make_form,
        read_grammar=read_grammar(context, body, prompt_end),
        can_continue=form == "chat",
    )
