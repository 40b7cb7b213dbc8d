"""Context: the objects that the routes of one app share, as a request for one model uses them.

Owns: the Context and its construction from the settings; the Context of each further model.
Does not: hold the state of a single request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.requests import Request

from octavo.core.request import sampling_defaults
from octavo.errors import ConfigError
from octavo.fleet.served_models import OnDemandModel
from octavo.frontend.adapters import STORE_FILE, Adapter, AdapterClient, AdapterRegistry
from octavo.mcp import McpServers, read_specs
from octavo.observe.metrics.prometheus import RequestMetrics, cache_info
from octavo.observe.otel import Tracer
from octavo.sandbox.pool import Sandbox
from octavo.server.admission import AdmissionControl, EngineQueue, QueueForecast
from octavo.server.api.batches.service import BatchService
from octavo.server.api.responses.store import Background, ResponseStore
from octavo.server.api.sampling import ParamsReader
from octavo.server.api.structured_output import GrammarReader
from octavo.server.feed import Feed
from octavo.server.http.auth import Logins
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import KeyRing
from octavo.server.http.lifecycle import Lifecycle, RequestIndex
from octavo.server.http.limits import HttpLimits, Shares
from octavo.server.idempotency import IdempotentRequests
from octavo.server.images import ImageReader
from octavo.server.prompts import PromptReader
from octavo.text.dialect import Dialect, read_dialect

if TYPE_CHECKING:
    from octavo.config import Config
    from octavo.frontend.engine_supervisor import EngineSupervisor
    from octavo.frontend.sessions import Sessions
    from octavo.server.encoding import AnswerSpec
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
    images: ImageReader
    prompts: PromptReader
    params: ParamsReader
    dialect: Dialect
    responses: ResponseStore
    background: Background
    mcp: McpServers
    grammars: GrammarReader
    batches: BatchService
    adapters: AdapterRegistry
    tracer: Tracer = field(default_factory=lambda: Tracer(None))
    cache_info: dict[str, str] = field(default_factory=dict)  # the KV pool's settings, as labels for metrics
    explain_kept: str = ""  # how many ended requests can be explained and for how long, as text
    by_name: dict[str, Context] = field(default_factory=dict)  # of models that are loaded on demand: all of them
    adapter: Adapter | None = None  # that requests use
    parent: str | None = None  # the adapter's model

    @property
    def model(self) -> str:
        """The model's first name. Metrics use it, and so do answers to requests without a model name."""
        return self.models[0]

    @property
    def max_model_len(self) -> int:
        """The most tokens of one request: its prompt and its answer."""
        return self.prompts.max_len

    @property
    def served(self) -> OnDemandModel | None:
        """The model's engine if it is loaded on demand; None if the server's only engine always runs."""
        client = self.sessions.client
        return client if isinstance(client, OnDemandModel) else None

    @property
    def is_loaded(self) -> bool:
        """True if the model takes memory."""
        return self.served is None or self.served.engine is not None

    def recorded(self, spec: AnswerSpec) -> AnswerSpec:
        """Return the spec for the journal, which names the model's files if several models are served."""
        return spec if self.served is None else msgspec.structs.replace(spec, files=self.served.files)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models and adapters that the app serves, the default model's first."""
        return *self.all_models, *(adapter.name for adapter in self.adapters)

    @property
    def all_models(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(self.by_name) or self.models

    @property
    def each_model(self) -> tuple[Context, ...]:
        """The Context of each model that the app serves, the default model's first."""
        return tuple({context.model: context for context in self.by_name.values()}.values()) or (self,)

    def for_model(self, name: str | None) -> Context:
        """Return the Context of the model or adapter that a request names; this one for None. Raises ApiError (404)."""
        if name is None or name in self.models:
            return self
        found = self.by_name.get(name)
        if found is not None:
            return found
        adapter = self.adapters.get(name)
        if adapter is None:
            raise model_not_found(name, self.all_names)
        sessions, fine = (each.with_adapter(adapter.adapter_id) for each in (self.sessions, self.fine_sessions))
        return replace(self, models=(name,), sessions=sessions, fine_sessions=fine, adapter=adapter, parent=self.model)

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
    keys, sandbox, images = KeyRing.of(config.serving), Sandbox(), ImageReader(config.media)
    runs = IdempotentRequests(config.retry, Shares(keys))
    own = _model_fields(sessions, text, config, (sandbox, images), limits)
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
        images=images,
        responses=ResponseStore(config.responses),
        background=Background(runs, lifecycle),
        mcp=McpServers(read_specs(config.mcp, needs_names=True), config.mcp.mcp_timeout_s),
        adapters=_adapter_registry(sessions, config),
        batches=BatchService(config.batch, keys, own["queue"].num_slots),
        tracer=Tracer(config.telemetry.otlp_traces_endpoint),
        explain_kept=f"the last {config.statistics.explain_kept}, for {config.statistics.explain_kept_s:g} s",
    )


def _model_fields(
    sessions: Sessions, text: TextModel, config: Config, readers: tuple[Sandbox, ImageReader], limits: HttpLimits
) -> dict[str, Any]:
    """Return the fields of a Context that belong to one model."""
    sandbox, images = readers
    models = tuple(dict.fromkeys(config.model.served_model_name)) or (text.name,)
    queue = _engine_queue(config, sessions)
    template = None if text.chat_template is None else text.chat_template.source
    dialect = read_dialect(template, config.chat.tool_call_parser, config.chat.reasoning_parser)
    takes_images = text.spec.vision is not None
    takes_images &= sessions.capacity is None or "image" in sessions.capacity.media
    dialect = replace(dialect, takes_images=takes_images)
    return {
        "sessions": sessions,
        "text": text,
        "models": models,
        "metrics": RequestMetrics(models[0]),
        "fine_sessions": sessions.token_by_token(),
        "queue": queue,
        "admission": AdmissionControl(config.admission, queue, is_by_priority=config.scheduling.policy == "priority"),
        "prompts": PromptReader(text, _max_len(config, text, sessions), sandbox, dialect, images),
        "params": ParamsReader(
            sampling_defaults(text.spec.generation),
            text.tokenizer,
            limits.max_choices,
            (dialect.shown_ids(False, text.tokenizer), dialect.shown_ids(True, text.tokenizer)),
        ),
        "dialect": dialect,
        "grammars": GrammarReader(sandbox, text),
        "cache_info": _cache_info(config, sessions),
    }


def _adapter_registry(sessions: Sessions, config: Config) -> AdapterRegistry:
    """Return the registry of the settings' adapters. Raises ConfigError, ModelFileError."""
    if config.adapters.is_enabled and isinstance(sessions.client, OnDemandModel):
        raise ConfigError(
            "adapters need a server of one model, which is always loaded; leave out --enable-lora and --lora-modules"
        )
    folder = config.retry.journal
    store = None if folder is None else Path(folder) / STORE_FILE
    return AdapterRegistry(cast(AdapterClient, sessions.client), config.adapters, store)


def add_models(root: Context, models: Sequence[tuple[Sessions, Config]]) -> None:
    """Add the Contexts of all models that are loaded on demand to the app's Context, which is the first one's.

    They share what is not a model's own: the keys with their meters and rates, the kept answers, the open requests.
    Raises ConfigError if two models have one name.
    """
    for number, (sessions, config) in enumerate(models):
        context = root
        if number:
            own = _model_fields(sessions, sessions.text, config, (root.sandbox, root.images), root.limits)
            feed = Feed(sessions.client, root.keys, root.lifecycle, root.limits)
            context = replace(root, **own, engine_statistics=sessions.client.statistics, feed=feed)
            context.admission.meters = root.admission.meters
        for name in context.models:
            if name in root.by_name:
                raise ConfigError(f"two models have the name {name!r}; give each a name of its own")
            root.by_name[name] = context
        assert context.served is not None
        context.served.on_loaded = partial(_adopt_engine, context, config)


def follow_capacity(engine: EngineSupervisor, queue: EngineQueue) -> None:
    """Have admission count the room of all replicas, as they are added, lost and removed."""

    def resize(num_slots: int, num_kv_tokens: int) -> None:
        queue.num_slots, queue.num_kv_tokens = num_slots, num_kv_tokens

    engine.on_capacity = resize
    resize(*engine.total_capacity())


def _adopt_engine(context: Context, config: Config, engine: EngineSupervisor) -> None:
    """Take the figures of a model's new engine."""
    sessions = context.sessions
    sessions.capacity = context.fine_sessions.capacity = engine.capacity
    follow_capacity(engine, context.queue)
    context.prompts.max_len = _max_len(config, context.text, sessions)
    context.cache_info.update(_cache_info(config, sessions))


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


def model_not_found(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for a name of no model or adapter."""
    served = ", ".join(known) or "none"
    return ApiError(
        404, f"no model {name[:128]!r} is served here; this server has: {served}", code="model_not_found", param="model"
    )


def context_of(request: Request) -> Context:
    """Return the context of the app that serves this request."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
