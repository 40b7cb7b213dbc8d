"""Every field of Anthropic's messages is honoured, refused by name, or documented as ignored."""

from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params

from octavo.core.request import Request
from octavo.server.api.anthropic.bodies import (
    IGNORED_BLOCK,
    IGNORED_MESSAGES,
    REFUSED_MESSAGES,
    AnthropicTool,
    AnthropicToolChoice,
    CountBody,
    MessagesBody,
    OutputConfig,
    Thinking,
)
from octavo.server.api.fields import HINTS
from tests.server.fakes import FakeClient, Harness, assert_ignored
from tests.source_tree import ROOT

PLAYED = FakeClient().tokenizer
Check = Callable[[Request, Any], bool]
TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}
ALWAYS = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def params(check: Callable[[Any], bool]) -> Check:
    return lambda request, _: check(request.params)


def shows(text: str) -> Check:
    return lambda request, _: text in PLAYED.decode(request.prompt_token_ids, skip_special_tokens=False)


# Field -> (other fields, its value, proof that it acted).
HONOURED: dict[str, tuple[dict[str, Any], Any, Check]] = {
    "model": ({}, "tiny", lambda _, r: r.json()["model"] == "tiny"),
    "messages": ({}, [{"role": "user", "content": "z"}], shows("user:z")),
    "max_tokens": ({}, 3, params(lambda p: p.max_tokens == 3)),
    "system": ({}, "be", shows("system:be")),
    "stop_sequences": ({}, ["lo"], params(lambda p: p.stop == ("lo",))),
    "stream": ({}, True, lambda _, r: "event: message_stop" in r.text),
    "temperature": ({}, 0.5, params(lambda p: p.temperature == 0.5)),
    "top_k": ({}, 5, params(lambda p: p.top_k == 5)),
    "top_p": ({}, 0.5, params(lambda p: p.top_p == 0.5)),
    "min_p": ({}, 0.5, params(lambda p: p.min_p == 0.5)),
    "seed": ({}, 11, params(lambda p: p.seed == 11)),
    "tools": ({}, [TOOL], shows("looks")),
    "tool_choice": ({"tools": [TOOL]}, {"type": "none"}, lambda q, _: not shows("looks")(q, _)),
    "thinking": ({}, {"type": "disabled"}, lambda _, r: r.status_code == 200),
    "output_config": (
        {},
        {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        params(lambda p: p.grammar != ""),
    ),
    "priority": ({}, -4, lambda q, _: q.priority == -4),
    "cache_salt": ({}, "salt", lambda q, _: q.cache_salt == b"salt"),
    "queue_timeout": ({}, 2.5, lambda q, _: q.queue_timeout == 2.5),
    "timeout": ({}, 2.5, lambda q, _: abs(q.deadline - q.arrival - 2.5) < 1e-6),
    "ttft_objective": ({}, 0.5, lambda q, _: q.ttft_objective == 0.5),
    "tpot_objective": ({}, 0.05, lambda q, _: q.tpot_objective == 0.05),
}


def known_fields() -> set[str]:
    theirs = set(message_create_params.MessageCreateParamsBase.__annotations__)
    theirs |= set(beta_params.MessageCreateParamsBase.__annotations__) | {"stream", "temperature", "top_k", "top_p"}
    return theirs | set(MessagesBody.model_fields) | set(REFUSED_MESSAGES) | set(IGNORED_MESSAGES)


async def ask(harness: Harness, **fields: Any) -> Any:
    return await harness.request("POST", "/v1/messages", json={**ALWAYS, **fields})


@pytest.mark.parametrize("field", sorted(known_fields()))
async def test_each_field_is_honoured_refused_or_ignored(field: str) -> None:
    kinds = [field in MessagesBody.model_fields, field in REFUSED_MESSAGES, field in IGNORED_MESSAGES]
    assert sum(kinds) <= 1, f"{field} must be in one of the body, the refused and the ignored fields"
    harness = Harness()
    if not any(kinds):
        assert_ignored(await ask(harness, **{field: 3}), field)
        return
    if field in REFUSED_MESSAGES:
        response = await ask(harness, **{field: "not neutral"})
        assert response.status_code == 400 and response.json()["error"]["message"].startswith(f"{field}: ")
        for neutral in (*REFUSED_MESSAGES[field], None):
            assert (await ask(harness, **{field: neutral})).status_code == 200
    elif field in IGNORED_MESSAGES:
        assert (await ask(harness, seed=1)).status_code == 200
        assert (await ask(harness, seed=1, **{field: {"type": "x"}})).status_code == 200
        first, second = harness.engine.requests
        assert (first.params, first.prompt_token_ids) == (second.params, second.prompt_token_ids)
    else:
        others, value, proof = HONOURED[field]
        response = await ask(harness, **{**others, field: value})
        assert response.status_code == 200, response.text
        assert proof(harness.engine.requests[-1], response)


def test_counting_knows_the_same_fields() -> None:
    theirs = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    theirs |= set(beta_count_params.MessageCountTokensParams.__annotations__)
    assert theirs - set(HINTS) <= set(CountBody.model_fields) | set(REFUSED_MESSAGES) | set(IGNORED_MESSAGES)
    assert not CountBody.model_fields["max_tokens"].is_required()


def keys(annotated: Any) -> set[str]:
    return set(annotated.__annotations__)


def test_the_parts_know_their_fields() -> None:
    from anthropic.types import (
        output_config_param,
        text_block_param,
        thinking_block_param,
        thinking_config_enabled_param,
        tool_choice_tool_param,
        tool_param,
        tool_result_block_param,
        tool_use_block_param,
    )

    from octavo.server.api.anthropic import bodies as ours

    assert keys(tool_param.ToolParam) - set(HINTS) == set(AnthropicTool.model_fields) | set(ours._IGNORED_TOOL)
    assert keys(tool_choice_tool_param.ToolChoiceToolParam) == set(AnthropicToolChoice.model_fields)
    thinking = keys(thinking_config_enabled_param.ThinkingConfigEnabledParam)
    assert thinking == set(Thinking.model_fields) | set(ours._IGNORED_THINKING)
    assert keys(output_config_param.OutputConfigParam) == set(OutputConfig.model_fields)
    aside = set(IGNORED_BLOCK) | set(ours._REFUSED_BLOCK)
    for theirs, mine in (
        (text_block_param.TextBlockParam, ours.TextBlock),
        (thinking_block_param.ThinkingBlockParam, ours.ThinkingBlock),
        (tool_use_block_param.ToolUseBlockParam, ours.ToolUseBlock),
        (tool_result_block_param.ToolResultBlockParam, ours.ToolResultBlock),
    ):
        assert keys(theirs) - aside == set(mine.model_fields)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None},
        {"type": "text", "text": "hi", "citations": []},
    ],
)
async def test_what_is_ignored_in_a_block_changes_nothing(block: dict[str, Any]) -> None:
    harness = Harness()
    assert (await ask(harness, seed=1)).status_code == 200
    assert (await ask(harness, seed=1, messages=[{"role": "user", "content": [block]}])).status_code == 200
    first, second = harness.engine.requests
    assert (first.params, first.prompt_token_ids) == (second.params, second.prompt_token_ids)


async def test_the_api_description_has_them() -> None:
    paths = (await Harness().get("/openapi.json")).json()["paths"]
    for path, body in (("/v1/messages", MessagesBody), ("/v1/messages/count_tokens", CountBody)):
        described = paths[path]["post"]
        assert all(f"`{field}` (" in described["description"] for field in IGNORED_MESSAGES)
        assert set(described["requestBody"]["content"]["application/json"]["schema"]["properties"]) == set(
            body.model_fields
        )


def test_the_page_tells_of_every_field_that_is_not_honoured() -> None:
    from octavo.server.api.anthropic import bodies as messages
    from octavo.server.api.ollama import bodies as ollama

    page = (ROOT / "docs" / "apis.md").read_text(encoding="utf-8")
    tables: list[Any] = [IGNORED_MESSAGES, REFUSED_MESSAGES, IGNORED_BLOCK, messages._IGNORED_TOOL]
    tables += [ollama.IGNORED_OLLAMA, ollama.REFUSED_GENERATE, ollama.IGNORED_OPTIONS]
    tables += [ollama.Options.model_fields]
    assert [name for table in tables for name in table if f"`{name}`" not in page] == []
