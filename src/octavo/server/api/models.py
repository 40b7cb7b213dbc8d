"""GET /v1/models and /v1/models/{id}, for clients of OpenAI and Anthropic; descriptions for Ollama's API; /props; and
POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Owns: the described facts, such as sizes, family and capabilities. Does not: read weights (the engine reports their
bytes), or load adapters (frontend/adapters.py and the engine do). A request uses an adapter by naming it as its model.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.artifacts.encoder_families import ENCODER_FAMILIES
from octavo.artifacts.families import FAMILIES
from octavo.core.request import SamplingParams, sampling_defaults
from octavo.errors import ConfigError, ModelFileError
from octavo.server.api.fields import Body, read
from octavo.server.api.sampling import SAMPLING_FIELDS
from octavo.server.context import Context, context_of, model_not_found
from octavo.server.encoding import Json
from octavo.server.http.body import json_response, read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError, bad_field, is_anthropic

if TYPE_CHECKING:
    from octavo.artifacts.model_spec import ModelSpec

_NEVER = "9999-12-31T00:00:00Z"  # the time when the model is unloaded


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of the text model's weights: embeddings, attention, feed-forward or experts, norms."""
    hidden, head = spec.hidden_size, spec.head_dim
    attention = 2 * hidden * spec.num_heads * head + 2 * hidden * spec.num_kv_heads * head
    encoder, decoder = ENCODER_FAMILIES.get(spec.family), FAMILIES.get(spec.family)
    is_gated = encoder.is_gated if encoder is not None else decoder is None or decoder.has("gate_proj")
    forward = (2 + is_gated) * hidden
    layers = spec.num_layers * (attention + 2 * hidden + forward * spec.intermediate_size)
    if (mixture := spec.mixture) is not None:
        experts = mixture.num_experts * (hidden + forward * mixture.intermediate_size) + forward * mixture.shared_size
        layers += len(mixture.layers) * (experts - forward * spec.intermediate_size)
    embeddings = spec.vocab_size * hidden * (1 if spec.tie_word_embeddings else 2)
    return embeddings + layers + hidden


def moment(seconds: float) -> str:
    """Return a time in Unix seconds as RFC 3339 text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def anthropic_card(context: Context, name: str) -> Json:
    """Return the model as an entry of Anthropic's list."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": moment(context.created),
        "lifecycle": "active",
        "max_input_tokens": context.max_model_len,
        "max_tokens": context.max_model_len,
    }


def ollama_card(context: Context, name: str) -> Json:
    """Return the model as an entry of Ollama's list. `digest` is a hash of the model's first name, not of its files."""
    return {
        "name": name,
        "model": name,
        "modified_at": moment(context.created),
        "size": _weight_bytes(context),
        "digest": hashlib.sha256(context.model.encode()).hexdigest(),
        "details": _details(context),
    }


def ollama_running(context: Context, name: str) -> Json:
    """Return the model as an entry of Ollama's list of loaded models."""
    card, served = ollama_card(context, name), context.served
    del card["modified_at"]
    is_on_cpu = context.sessions.capacity is None or context.sessions.capacity.device == "cpu"
    size_vram = 0 if is_on_cpu else card["size"]
    expires_at = _NEVER if served is None or served.keep_alive_s < 0 else moment(served.latest_end)
    return {**card, "expires_at": expires_at, "size_vram": size_vram, "context_length": context.max_model_len}


def ollama_show(context: Context, name: str) -> Json:
    """Return the model's details as Ollama's /api/show does."""
    spec, family = context.text.spec, context.text.spec.family
    template = context.text.chat_template
    source = "" if template is None else template.source
    return {
        "modelfile": f"# served by octavo\nFROM {name}\n",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in sorted(spec.generation.items())),
        "template": source,
        "modified_at": moment(context.created),
        "details": _details(context),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": num_parameters(spec),
            f"{family}.context_length": context.max_model_len,
            f"{family}.embedding_length": spec.vector_size,
            f"{family}.block_count": spec.num_layers,
            f"{family}.feed_forward_length": spec.intermediate_size,
            f"{family}.attention.head_count": spec.num_heads,
            f"{family}.attention.head_count_kv": spec.num_kv_heads,
            f"{family}.rope.freq_base": spec.rope_theta,
            f"{family}.vocab_size": spec.vocab_size,
        },
        "capabilities": _capabilities(context) if spec.encoder is None else ["embedding"],
    }


def _capabilities(context: Context) -> list[str]:
    dialect = context.dialect
    has = {
        "vision": dialect.takes_images,
        "tools": dialect.calls is not None,
        "thinking": dialect.reasoning is not None,
    }
    return ["completion", "embedding", *(name for name, is_true in has.items() if is_true)]


def _details(context: Context) -> Json:
    spec = context.text.spec
    count = num_parameters(spec)
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    return {
        "parent_model": "",
        "format": context.text.weight_format,
        "family": spec.family,
        "families": [spec.family],
        "parameter_size": size,
        "quantization_level": spec.quantization or spec.dtype,
    }


def _weight_bytes(context: Context) -> int:
    return 0 if context.sessions.capacity is None else context.sessions.capacity.weight_bytes


def _card(context: Context, name: str) -> dict[str, object]:
    state: dict[str, object] = {} if context.served is None else {"state": context.served.state.value}
    encoder = context.text.spec.encoder
    if encoder is not None:
        state["purpose"] = encoder.purpose
    return {
        **state,
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.text.name if context.adapter is None else context.adapter.path,
        "parent": context.parent,
        "max_model_len": context.max_model_len,
        "input_modalities": ["text", *(["image"] if context.dialect.takes_images else [])],
    }


async def list_models(request: Request) -> Response:
    """List every served model under each of its names."""
    context = context_of(request)
    names = context.all_names
    if is_anthropic(request.scope):
        cards = [anthropic_card(context.for_model(name), name) for name in names]
        body: dict[str, object] = {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    else:
        body = {"object": "list", "data": [_card(context.for_model(name), name) for name in names]}
    return json_response(body)


async def get_model(request: Request) -> Response:
    """Describe a served model. Any other name gets a 404."""
    name = request.path_params["model_id"]
    context = context_of(request).for_model(name)
    card = anthropic_card(context, name) if is_anthropic(request.scope) else _card(context, name)
    return json_response(card)


_LLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}  # a sampling parameter -> llama.cpp's name
_SHOWN_PARAMS = (*(each.name for each in SAMPLING_FIELDS), "max_tokens")


async def get_props(request: Request) -> Response:
    """Describe a model (`?model=`) as llama.cpp does: template, context length, modalities, default sampling."""
    context = context_of(request)
    context = context.for_model(request.query_params.get("model") or context.model)
    text, capacity = context.text, context.sessions.capacity
    defaults = SamplingParams(**{"max_tokens": None, **sampling_defaults(text.spec.generation)})
    params = {_LLAMA_NAMES.get(name, name): getattr(defaults, name) for name in _SHOWN_PARAMS}
    tokens = text.tokenizer.special_tokens
    return json_response(
        {
            "default_generation_settings": {"params": params, "n_ctx": context.max_model_len},
            "total_slots": 0 if capacity is None else capacity.num_slots,
            "model_alias": context.model,
            "model_path": text.name,
            "modalities": {"vision": context.dialect.takes_images, "audio": False},
            "chat_template": "" if text.chat_template is None else text.chat_template.source,
            "bos_token": tokens.get("bos_token", ""),
            "eos_token": tokens.get("eos_token", ""),
        }
    )


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter: an adapter's folder (or .gguf file) on the server's machine."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(request: Request) -> Response:
    """Load a low-rank adapter, which requests then name as their model; needs --allow-runtime-lora-updating."""
    context = context_of(request)
    body = await read_json(request, context.limits, lambda fields: read(LoadAdapterBody, fields, {}, {}))
    _check_can_change(context)
    try:
        await context.adapters.load(body.lora_name, body.lora_path, context.all_models)
    except (ConfigError, ModelFileError) as error:
        raise bad_field("lora_path", str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Remove an adapter; its open requests go on. Any other name gets a 404."""
    context = context_of(request)
    body = await read_json(request, context.limits, lambda fields: read(UnloadAdapterBody, fields, {}, {}))
    _check_can_change(context)
    if context.adapters.unload(body.lora_name) is None:
        raise model_not_found(body.lora_name, [each.name for each in context.adapters])
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_can_change(context: Context) -> None:
    """Raise ApiError (403) unless adapters can be changed over HTTP."""
    if not context.adapters.can_change:
        message = "adapters are loaded by the operator (octavo admin load_adapter), or by clients of a server that was "
        message += "started with --allow-runtime-lora-updating"
        raise ApiError(403, message, code="adapters_not_allowed")


ENDPOINTS = [
    Endpoint("GET", "/props", get_props, limit=Limit.NONE),
    Endpoint("GET", "/v1/models", list_models, limit=Limit.NONE),
    Endpoint("GET", "/v1/models/{model_id:path}", get_model, limit=Limit.NONE),
    Endpoint("POST", "/v1/load_lora_adapter", load_adapter, body=LoadAdapterBody),
    Endpoint("POST", "/v1/unload_lora_adapter", unload_adapter, body=UnloadAdapterBody),
]
