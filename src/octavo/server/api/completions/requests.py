"""/v1/chat/completions and /v1/completions: turns a body into a GenerationRequest; declares the routes.

Owns: ChatRequest, which other APIs use after translating their bodies to a ChatBody; CompletionRequest.
Does not: encode answers (answers does) or submit requests (generation does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.grammar.answer import AnswerSource, CallSource
from octavo.server.api.completions.bodies import (
    REFUSED_CHAT,
    REFUSED_COMPLETION,
    ChatBody,
    CompletionBody,
    read_chat,
    read_completion,
)
from octavo.server.api.fields import IGNORED_FIELDS, IgnoredFields, field_notes
from octavo.server.api.ollama.bodies import SENT_NAMES, with_ollama_names
from octavo.server.api.sampling import MAX_ALLOWED_IDS, SamplingBody, check_scores, spellings
from octavo.server.api.structured_output import STRUCTURE_FIELDS, Structure, given_structures, refusal, structure_of
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerSpec, Identity
from octavo.server.generation import GenerationRequest
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import queued
from octavo.server.http.errors import bad_field, from_exception, with_field
from octavo.server.reply import RESUME_NOTE, reply
from octavo.text.answer_format import AnswerFormat
from octavo.text.dialect import text_arguments

FORCED_AS = {"qwen3_coder": "hermes"}  # under a grammar, since a schema cannot constrain qwen3_coder's values
MAX_FORCED_CALLS = 16  # in one answer that a grammar restricts to calls


@dataclass(kw_only=True)
class TextRequest(GenerationRequest):
    """A request for text, from a SamplingBody. `facts` are the extra data for the encoder of `kind`."""

    body: SamplingBody
    kind: str
    facts: Mapping[str, object] = field(default_factory=dict)
    structure: Structure | None = None  # the constraint of the answer
    echoes: Sequence[str] = ("",)  # each prompt's text, if it is repeated before each of its choices
    num_choices: int = 1  # per echo

    async def read_grammar(self) -> str:
        """Return the compiled constraint."""
        assert self.structure is not None
        return await self.context.grammars.read_structure(self.structure)

    def field_names(self) -> dict[str, str]:
        """Return a map from field names to the client's names, including sampling fields."""
        return {**spellings(self.body), **super().field_names()}

    def _spec(self, identity: Identity, prompts: Sequence[Sequence[int]], own: Mapping[str, object]) -> AnswerSpec:
        """Return the spec with the facts of the request and `own`. Raises ApiError for too many log-probabilities."""
        body, facts = self.body, {**self.facts, **own}
        options = body.stream_options
        includes_usage = options is not None and options.include_usage
        if options is not None and includes_usage and options.continuous_usage_stats:
            facts["num_prompt_tokens_each"] = [len(ids) for ids in prompts]
        if body.return_token_ids:
            facts["prompt_token_ids"] = [list(ids) for ids in prompts]
        if body.return_tokens_as_token_ids:
            facts["shows_ids"] = True
        if self.params.prompt_logprobs is not None:
            check_scores(sum(map(len, prompts)), self.params.prompt_logprobs)
            if body.prompt_logprobs is not None:
                facts["num_prompt_logprobs"] = body.prompt_logprobs
        return AnswerSpec(self.kind, identity, includes_usage, tuple(self.echoes), self.num_choices, facts)


@dataclass(kw_only=True)
class ChatRequest(TextRequest):
    """The request for the answer to a conversation."""

    body: ChatBody
    prompt_param: str = "messages"
    prompt: Sequence[int] = ()  # set by read_prompts

    @classmethod
    async def of(cls, context: Context, body: ChatBody, kind: str, id_prefix: str, **fields: Any) -> Self:
        """Return the request of a body of any API. Raises ApiError."""
        params = await context.params.read(body)
        if body.tools or not STRUCTURE_FIELDS.isdisjoint(body.model_fields_set):
            fields["structure"] = _structure_of(body)
            fields["is_constrained"] = fields["structure"] is not None or bool(body.forced)
            if body.forced:
                _check_forced(context, body)
        return cls(
            context=context,
            body=body,
            params=params,
            kind=kind,
            id_prefix=id_prefix,
            num_characters=body.num_characters,
            stream=body.stream,
            **fields,
        )

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the token ids of the rendered conversation."""
        found = await self.context.prompts.chat(self.body, self.params.num_kept(self.context.max_model_len))
        self.prompt, self.spans, self.media = found.ids, found.spans, found.media
        return [self.prompt]

    async def read_grammar(self) -> str:
        """Return the answer's grammar: a constraint, calls, or either, after the reasoning."""
        body, dialect, structure = self.body, self.context.dialect, self.structure
        has_calls = bool(body.usable_tools) and dialect.calls is not None
        if structure is not None and not has_calls and dialect.reasoning is None:
            return await super().read_grammar()
        source = msgspec.json.encode(self._grammar_source()).decode()
        try:
            return await self.context.grammars.read("answer", source)
        except RequestError as error:
            if structure is not None and not body.forced and not (error.param or "").startswith("tools"):
                raise refusal(error, structure) from None
            param = error.param or "tools"
            raise from_exception(type(error)(with_field(str(error), param, param), param)) from None

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return the spec, including the answer's format if it has several parts."""
        facts: dict[str, object] = {"num_prompt_tokens": len(self.prompt)}
        if (answer_format := self.answer_format()) is not None:
            facts["format"] = answer_format
        return self._spec(identity, [self.prompt], facts)

    def answer_format(self) -> AnswerFormat | None:
        """Return the format that separates the answer's parts; None if the whole answer is content."""
        body = self.body
        tools = body.usable_tools if body.tools else []
        calls = self.context.dialect.calls if tools else None
        reasoning, starts_inside = self.context.dialect.reasoning_after(self.prompt, self.context.text.tokenizer)
        if calls is None:
            return None if reasoning is None else AnswerFormat(reasoning, starts_inside)
        return AnswerFormat(
            reasoning=reasoning,
            starts_inside=starts_inside,
            calls=FORCED_AS.get(calls, calls) if body.forced or given_structures(body) else calls,
            forced=body.forced,
            names=tuple(tool.function.name for tool in tools),
            texts=text_arguments([tool.shown() for tool in tools]) if calls == "qwen3_coder" else (),
            is_single=body.parallel_tool_calls is False,
        )

    def _grammar_source(self) -> AnswerSource:
        body = self.body
        dialect, tokenizer = self.context.dialect, self.context.text.tokenizer
        tools = body.usable_tools if dialect.calls is not None else []
        calls = None
        if tools and dialect.calls is not None:
            may_be_more = body.parallel_tool_calls is not False if body.forced is None else body.parallel_tool_calls
            most = MAX_FORCED_CALLS if may_be_more and body.forced != "named" else 1
            schemas = [(tool.function.name, tool.function.parameters) for tool in tools]
            calls = CallSource(FORCED_AS.get(dialect.calls, dialect.calls), schemas, most)
        reasoning, starts_inside = self.context.dialect.reasoning_after(self.prompt, self.context.text.tokenizer)
        markers = dialect.markers(bool(tools))
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in markers}
        structure = None
        if self.structure is not None and not body.forced:
            structure = (self.structure.kind, self.structure.source, self.structure.whitespace)
        return AnswerSource(
            reasoning=reasoning,
            starts_inside=starts_inside,
            calls=calls,
            structure=structure,
            special={marker: token_id for marker, token_id in ids.items() if token_id in tokenizer.special_ids},
        )


@dataclass(kw_only=True)
class CompletionRequest(TextRequest):
    """A request to continue one or several texts. Choices are numbered prompt by prompt."""

    body: CompletionBody
    prompt_param: str = "prompt"
    prompts: Sequence[Sequence[int]] = ()  # set by read_prompts

    @classmethod
    async def of(cls, context: Context, body: CompletionBody, kind: str, id_prefix: str, **fields: Any) -> Self:
        """Return the request of a body. Raises ApiError."""
        structure = _structure_of(body)
        return cls(
            context=context,
            body=body,
            params=await context.params.read(body),
            kind=kind,
            id_prefix=id_prefix,
            num_prompts=len(body.prompt),
            num_characters=sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)),
            num_ids=sum(len(prompt) for prompt in body.prompt if isinstance(prompt, list)),
            structure=structure,
            is_constrained=structure is not None,
            echoes=[""] * len(body.prompt),
            num_choices=1 if body.n is None else body.n,
            stream=body.stream,
            **fields,
        )

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the token ids of the prompts."""
        body, num_kept = self.body, self.params.num_kept(self.context.max_model_len)
        self.prompts = await self.context.prompts.completion(body.prompt, num_kept, body.add_special_tokens)
        if body.echo:
            self.echoes = await self.context.prompts.echo(body.prompt if num_kept is None else self.prompts)
        return self.prompts

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return the spec, including the data for the log-probabilities of echoed prompts."""
        facts: dict[str, object] = {}
        if self.body.echo and self.body.logprobs is not None:
            facts = {"num_echo": self.body.logprobs, "first_ids": [ids[0] for ids in self.prompts]}
        return self._spec(identity, self.prompts, facts)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)

    def read(fields: dict[str, object]) -> ChatBody:
        is_plain = fields.keys().isdisjoint(SENT_NAMES)
        dialect = context.dialect_of(fields)
        return read_chat(fields if is_plain else with_ollama_names(fields, dialect), dialect.takes_images)

    body = await read_json(request, context.limits, read)
    context = context.for_model(body.model)
    if not context.dialect.effort_variables and body.effort_field is not None:
        ignored: IgnoredFields = request.scope[IGNORED_FIELDS]
        if body.effort != "none" or context.dialect.reasoning is not None:  # else there is no reasoning to switch off
            ignored.add(body.effort_field)
    return await reply(request, await ChatRequest.of(context, body, "chat", "chatcmpl"))


async def completions(request: Request) -> Response:
    """Continue one or several texts. Choices are numbered prompt by prompt."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_completion)
    context = context.for_model(body.model)
    num_prompts = len(body.prompt)
    if num_prompts > context.limits.max_prompts:
        raise bad_field("prompt", f"prompt holds {num_prompts} prompts; give at most {context.limits.max_prompts}")
    _check_ids_in_all(body)
    return await reply(request, await CompletionRequest.of(context, body, "text", "cmpl"))


def _structure_of(body: SamplingBody) -> Structure | None:
    """Return the constraint in a body; None without one. Raises ApiError for fields that contradict a constraint."""
    structure = structure_of(body)
    if structure is None:
        return None
    param, ends = structure.param, f"{structure.param} says when an answer ends; leave"
    if body.min_tokens:
        raise bad_field("min_tokens", f"min_tokens is {body.min_tokens}; {ends} min_tokens out")
    if body.ignore_eos:
        raise bad_field("ignore_eos", f"ignore_eos is true; {ends} ignore_eos out")
    if body.use_beam_search:
        raise bad_field("use_beam_search", f"use_beam_search is true; beams follow no {param}; leave one of them out")
    return structure


def _check_forced(context: Context, body: ChatBody) -> None:
    """Refuse a forced call that cannot be parsed, and fields that contradict a forced call. Raises ApiError."""
    for name, is_given in (
        ("min_tokens", bool(body.min_tokens)),
        ("ignore_eos", body.ignore_eos),
        ("use_beam_search", body.use_beam_search),
    ):
        if is_given:
            raise bad_field(name, f"{name} cannot be kept while tool_choice asks for a call; leave {name} out")
    if not body.usable_tools or context.dialect.calls is None:
        message = "tool_choice asks for a call, but --tool-call-parser none was given; no calls are read here"
        raise bad_field("tool_choice", message, "unsupported_field")


def _check_ids_in_all(body: CompletionBody) -> None:
    """Refuse many prompts with long lists of ids, since each prompt is sent to the engine with all lists."""
    lists = {"allowed_token_ids": body.allowed_token_ids, "logit_bias": body.logit_bias, "bad_words": body.bad_words}
    for name, ids in lists.items():
        if len(body.prompt) * len(ids) > MAX_ALLOWED_IDS:
            message = f"{name} has {len(ids)} entries for each of {len(body.prompt)} prompts; give at most "
            raise bad_field(name, f"{message}{MAX_ALLOWED_IDS} together")


_ABOUT_CHAT = ("Answer a conversation.", RESUME_NOTE, field_notes(REFUSED_CHAT))
_ABOUT = ("Go on with one or several texts, n choices each.", RESUME_NOTE, field_notes(REFUSED_COMPLETION))
ENDPOINTS = [
    queued("/v1/chat/completions", chat_completions, ChatBody, *_ABOUT_CHAT),
    queued("/v1/completions", completions, CompletionBody, *_ABOUT),
]
