"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.bodies.checks import field_notes
from octavo.server.bodies.completion import REFUSED_COMPLETION, CompletionBody, read_completion
from octavo.server.bodies.sampling import MAX_ALLOWED_IDS
from octavo.server.context import context_of
from octavo.server.encoding import AnswerSpec
from octavo.server.faults import bad_field
from octavo.server.grammars import structure_of
from octavo.server.limits import read_json
from octavo.server.params import read_params
from octavo.server.reply import RETRY_NOTE, Task, answer_facts, reply, wants_usage
from octavo.server.routes.posting import add_post


async def completions(request: Request) -> Response:
    """Go on with one or several texts; the choices of each prompt follow those of the one before."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_completion)
    context.check_model(body.model)
    num_prompts = len(body.prompt)
    if num_prompts > context.limits.max_prompts:
        raise bad_field("prompt", f"prompt holds {num_prompts} prompts; give at most {context.limits.max_prompts}")
    _check_ids_in_all(body)
    params = await read_params(body, context.params.completion)
    echoes = [""] * num_prompts

    facts: dict[str, object] = {}

    async def read_prompts() -> Sequence[Sequence[int]]:
        num_kept = params.num_kept(context.max_model_len)
        ids = await context.prompts.completion(body.prompt, num_kept, body.add_special_tokens)
        if body.echo:
            echoes[:] = await context.prompts.echo(body.prompt if num_kept is None else ids)
        facts.update(answer_facts(body, ids))
        if params.prompt_logprobs is not None:
            facts.update(_score_facts(body, ids))
        return ids

    task = Task(
        kind="cmpl",
        body=body,
        params=params,
        num_prompts=num_prompts,
        num_characters=sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)),
        num_ids=sum(len(prompt) for prompt in body.prompt if isinstance(prompt, list)),
        prompt_param="prompt",
        read_prompts=read_prompts,
        read_grammar=context.grammars.reader(structure_of(body)),
        make_form=lambda identity, _: AnswerSpec("text", identity, wants_usage(body), tuple(echoes), params.n, facts),
    )
    return await reply(request, task)


def _score_facts(body: CompletionBody, prompts: Sequence[Sequence[int]]) -> dict[str, object]:
    """What the answer's form has to know of log-probabilities of prompts (see shapes.completion)."""
    facts: dict[str, object] = {}
    if body.prompt_logprobs is not None:
        facts["num_prompt_logprobs"] = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        facts |= {"num_echo": body.logprobs, "first_ids": [ids[0] for ids in prompts]}
    return facts


def _check_ids_in_all(body: CompletionBody) -> None:
    """Each prompt takes the lists of ids along to the engine: many prompts with long lists are refused."""
    lists = {"allowed_token_ids": body.allowed_token_ids, "logit_bias": body.logit_bias, "bad_words": body.bad_words}
    for name, ids in lists.items():
        if len(body.prompt) * len(ids) > MAX_ALLOWED_IDS:
            message = f"{name} has {len(ids)} entries for each of {len(body.prompt)} prompts; give at most "
            raise bad_field(name, f"{message}{MAX_ALLOWED_IDS} together")


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoint."""
    about = "Go on with one or several texts, n choices each."
    add_post(app, "/v1/completions", completions, CompletionBody, about, RETRY_NOTE, field_notes(REFUSED_COMPLETION))
