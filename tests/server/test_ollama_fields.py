"""Every field of Ollama's requests is honoured, refused by name, or documented as ignored."""

from typing import Any

import pytest
from ollama import _types as theirs

from octavo.server.api.fields import HINTS
from octavo.server.api.ollama import bodies as ours
from octavo.server.api.ollama.bodies import IGNORED_EMBED, REFUSED_EMBED, OllamaEmbedBody, OllamaEmbeddingsBody
from tests.server.fakes import Harness

UNNEUTRAL: dict[str, Any] = {"penalize_newline": False}
ENDPOINTS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "/api/chat": (theirs.ChatRequest, ours.OllamaChatBody, ours.REFUSED_CHAT, {"messages": [{"role": "user"}]}),
    "/api/generate": (theirs.GenerateRequest, ours.OllamaGenerateBody, ours.REFUSED_GENERATE, {"prompt": "x"}),
}
CASES = [
    (path, field)
    for path, (request, body, refused, _) in ENDPOINTS.items()
    for field in sorted(set(request.model_fields) | set(body.model_fields) | set(refused) | set(ours.IGNORED_OLLAMA))
]


@pytest.mark.parametrize(("path", "field"), CASES)
async def test_each_field_is_honoured_refused_or_ignored(path: str, field: str) -> None:
    _, body, refused, least = ENDPOINTS[path]
    kinds = [field in body.model_fields, field in refused, field in ours.IGNORED_OLLAMA]
    assert sum(kinds) == 1, f"{field} must be in exactly one of the body, the refused and the ignored fields"
    if field in body.model_fields:
        return  # test_ollama.py shows what each does
    harness = Harness()

    async def ask(**fields: Any) -> Any:
        return await harness.request("POST", path, json={**least, "options": {"seed": 1}, "stream": False, **fields})

    if field in refused:
        response = await ask(**{field: "not neutral"})
        assert response.status_code == 400 and response.json()["error"].startswith(f"{field}: ")
        for neutral in (*refused[field], None):
            assert (await ask(**{field: neutral})).status_code == 200
    else:
        assert (await ask()).status_code == 200
        assert (await ask(**{field: "5m"})).status_code == 200
        first, second = harness.engine.requests
        assert (first.params, first.prompt_token_ids) == (second.params, second.prompt_token_ids)


def options() -> list[str]:
    mine = set(ours.Options.model_fields) | set(ours.IGNORED_OPTIONS)
    return sorted(set(theirs.Options.model_fields) | mine | {"num_gqa", "rope_frequency_base", "new_topic_penalty"})


@pytest.mark.parametrize("option", options())
async def test_each_option_is_honoured_or_ignored(option: str) -> None:
    kinds = [option in table for table in (ours.Options.model_fields, ours.IGNORED_OPTIONS)]
    assert sum(kinds) <= 1, f"{option} must be in one of the body and the ignored options"
    if option in ours.Options.model_fields:
        return
    harness = Harness()

    async def ask(**given: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": False, "options": {"seed": 1, **given}}
        return await harness.request("POST", "/api/chat", json=body)

    assert (await ask()).status_code == 200
    told = await ask(**{option: UNNEUTRAL.get(option, 2)})
    assert told.status_code == 200
    assert told.headers.get("x-octavo-ignored") == (None if any(kinds) else f"options.{option}")
    for neutral in HINTS.get(option, ()):
        assert "x-octavo-ignored" not in (await ask(**{option: neutral})).headers
    first, second, *_ = harness.engine.requests
    assert first.params == second.params


def test_messages_calls_and_embeddings_know_their_fields() -> None:
    assert set(theirs.Message.model_fields) <= set(ours.OllamaMessage.model_fields)
    assert set(theirs.Message.ToolCall.model_fields) <= set(ours.Call.model_fields)
    assert set(theirs.Message.ToolCall.Function.model_fields) <= set(ours.Function.model_fields)
    aside = set(IGNORED_EMBED) | set(REFUSED_EMBED)
    assert set(theirs.EmbedRequest.model_fields) - aside <= set(OllamaEmbedBody.model_fields)
    assert set(theirs.EmbeddingsRequest.model_fields) - aside <= set(OllamaEmbeddingsBody.model_fields)


async def test_the_api_description_has_them() -> None:
    paths = (await Harness().get("/openapi.json")).json()["paths"]
    for path, (_, body, refused, _) in ENDPOINTS.items():
        described = paths[path]["post"]
        assert all(f"`{field}`" in described["description"] for field in (*refused, *ours.IGNORED_OLLAMA))
        assert all(f"`{field}`" in described["description"] for field in ours.IGNORED_OPTIONS)
        schema = described["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == set(body.model_fields)
