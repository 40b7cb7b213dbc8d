"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Owns: their bodies and answers. Does not: read or run adapters (frontend/adapters.py and the engine do). A request uses
an adapter by naming it as its model.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.errors import ConfigError, ModelFileError
from octavo.server.api.fields import Body, read
from octavo.server.context import Context, context_of, model_not_found
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import Endpoint
from octavo.server.http.errors import ApiError, bad_field


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
    Endpoint("POST", "/v1/load_lora_adapter", load_adapter, body=LoadAdapterBody),
    Endpoint("POST", "/v1/unload_lora_adapter", unload_adapter, body=UnloadAdapterBody),
]
