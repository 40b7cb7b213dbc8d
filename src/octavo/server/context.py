"""Context: the objects that the routes of one app share, as a request for one model uses them.

Owns: the Context and its construction from the settings; the Context of each further model.
Does not: hold the state of a single request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from octavo.core.request import sampling_defaults
from octavo.observe.metrics.prometheus import RequestMetrics, cache_info
from octavo.observe.otel import Tracer
from octavo.sandbox.pool import Sandbox
from octavo.server.admission import AdmissionControl, EngineQueue, QueueForecast
from octavo.server.api.batches.service import BatchService
from octavo.server.api.responses.store import Background, ResponseStore
from octavo.server.api.sampling import ParamsReader, shown_ids
from octavo.server.api.structured_output import GrammarReader
from octavo.server.feed import Feed
from octavo.server.http.auth import Logins
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import KeyRing
from octavo.server.http.lifecycle import Lifecycle, RequestIndex
from octavo.server.http.limits import HttpLimits, Shares
from octavo.server.idempotency import IdempotentRequests
from octavo.server.prompts import PromptReader
from octavo.text.dialect import Dialect, read_dialect

if TYPE_CHECKING:
    from octavo.config import Config
    from octavo.frontend.sessions import Sessions
    from octavo.text.text_model import TextModel

EngineStatistics = Callable[[], Awaitable[Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that all routes share.

    The app's Context is that of its default model; `for_model` returns another model's, which shares all that is not a
    model's own. `models` are this model's names. `fine_sessions` yield one delta per token.
    """

    sessions: Sessions
    text: TextModel
    models: tuple[str, ...]
    created: int
    max_model_len: int
    engine_statistics: EngineStatistics
    limits: HttpLimits
    lifecycle: Lifecycle
    keys: KeyRing
    logins: Logins
    feed: Feed
    metrics: RequestMetrics
    fine_sessions: Sessions
    runs: IdempotentRequests
    queue: EngineQueue
    admission: AdmissionControl
    request_index: RequestIndex
    sandbox: Sandbox
    prompts: PromptReader
    params: ParamsReader
    dialect: Dialect
    responses: ResponseStore
    background: Background
    grammars: GrammarReader
    batches: BatchService
    tracer: Tracer = field(default_factory=lambda: Tracer(None))
    cache_info: Mapping[str, str] = field(default_factory=dict)  # the KV pool's settings, as labels for metrics
    explain_kept: str = ""  # how many ended requests can be explained and for how long, as text
    by_name: dict[str, Context] = field(default_factory=dict)  # if several models are served: all of them

    @property
    def model(self) -> str:
        """The model's first name. Metrics use it, and so do answers to requests without a model name."""
        return self.models[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models that the app serves, the default model's first."""
        return tuple(self.by_name) or self.models

    @property
    def each_model(self) -> tuple[Context, ...]:
        """The Context of each model that the app serves, the default model's first."""
        return tuple({context.model: context for context in self.by_name.values()}.values()) or (self,)

    def for_model(self, name: str | None) -> Context:
        """Return the Context of the model that a request names; this one for None. Raises ApiError (404)."""
        if name is None or name in self.models:
            return self
        found = self.by_name.get(name)
        if found is None:
            message = f"no model {name[:128]!r} is served here; this server has: {', '.join(self.all_names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return found

    def dialect_of(self, fields: Mapping[str, object]) -> Dialect:
        """Return the dialect of the model that a body names; this model's if none of that name is served."""
        name = fields.get("model")
        found = self.by_name.get(name.removesuffix(":latest")) if isinstance(name, str) else None
        return self.dialect if found is None else found.dialect


def build_context(
    sessions: Sessions,
    text: TextModel,
    config: Config,
    engine_statistics: EngineStatistics,
    *,
    limits: HttpLimits,
    lifecycle: Lifecycle,
) -> Context:
    """Build the context from the settings."""
    keys, sandbox = KeyRing.of(config.serving), Sandbox()
    runs = IdempotentRequests(config.retry, Shares(keys))
    own = _model_fields(sessions, text, config, sandbox, limits)
    return Context(
        **own,
        created=int(time.time()),
        engine_statistics=engine_statistics,
        limits=limits,
        lifecycle=lifecycle,
        keys=keys,
        logins=Logins(keys),
        feed=Feed(sessions.client, keys, lifecycle, limits),
        runs=runs,
        request_index=RequestIndex(config.statistics.explain_kept),
        sandbox=sandbox,
        responses=ResponseStore(config.responses),
        background=Background(runs, lifecycle),
        batches=BatchService(config.batch, keys, own["queue"].num_slots),
        tracer=Tracer(config.telemetry.otlp_traces_endpoint),
        explain_kept=f"the last {config.statistics.explain_kept}, for {config.statistics.explain_kept_s:g} s",
    )


def _model_fields(
    sessions: Sessions, text: TextModel, config: Config, sandbox: Sandbox, limits: HttpLimits
) -> dict[str, Any]:
    """Return the fields of a Context that belong to one model."""
    models = tuple(dict.fromkeys(config.model.served_model_name)) or (text.name,)
    queue = _engine_queue(config, sessions)
    template = None if text.chat_template is None else text.chat_template.source
    dialect = read_dialect(template, config.chat.tool_call_parser, config.chat.reasoning_parser)
    max_len = _max_len(config, text, sessions)
    return {
        "sessions": sessions,
        "text": text,
        "models": models,
        "max_model_len": max_len,
        "metrics": RequestMetrics(models[0]),
        "fine_sessions": sessions.token_by_token(),
        "queue": queue,
        "admission": AdmissionControl(config.admission, queue, is_by_priority=config.scheduling.policy == "priority"),
        "prompts": PromptReader(text, max_len, sandbox, dialect),
        "params": ParamsReader(
            sampling_defaults(text.spec.generation),
            text.tokenizer,
            limits.max_choices,
            (shown_ids(dialect, False, text.tokenizer), shown_ids(dialect, True, text.tokenizer)),
        ),
        "dialect": dialect,
        "grammars": GrammarReader(sandbox, text),
        "cache_info": _cache_info(config, sessions),
    }


def _max_len(config: Config, text: TextModel, sessions: Sessions) -> int:
    """Return the most tokens of one request: the smallest of the model's, --max-model-len's and the KV pool's bound."""
    lengths = [text.spec.max_model_len, config.model.max_model_len]
    lengths.append(None if sessions.capacity is None else sessions.capacity.usable_len)
    return min(length for length in lengths if length)


def _engine_queue(config: Config, sessions: Sessions) -> EngineQueue:
    capacity, forecast = sessions.capacity, QueueForecast(partial(sessions.client.control, "forecast"))
    if capacity is None:
        return EngineQueue(config.scheduling.max_sequences or 0, forecast=forecast)
    return EngineQueue(capacity.num_slots, capacity.num_blocks[0] * capacity.block_size, forecast)


def _cache_info(config: Config, sessions: Sessions) -> dict[str, str]:
    capacity = sessions.capacity
    return {} if capacity is None else cache_info(config, capacity.block_size, capacity.num_blocks[0])


def context_of(request: Request) -> Context:
    """Return the context of the app that serves this request."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
