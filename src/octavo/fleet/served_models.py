"""ServedModels: several models, each with an engine that is started for its first request and ended when it is idle.

Owns: which models are loaded; the order of loading (one at a time, in the order of the first requests); making room;
the timers of idle models. Does not: read tokenizers or templates, name models for clients (server.context does both),
or restart an engine that died (each model's EngineSupervisor does).
Invariants: a model with users is never unloaded. A waiting request is served, or fails with the reason for which its
model cannot be loaded. A model that others wait for is unloaded once its present users have left; those that arrive
later wait for it to be loaded again, so that no model waits forever.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, TokenOutput, Verb
from octavo.errors import CapacityError, EngineDeadError, ModelLoadError, OctavoError

if TYPE_CHECKING:
    from octavo.config import Config, ModelsConfig
    from octavo.executors.protocol import Capacity
    from octavo.fleet.model_configs import ServedModelConfig
    from octavo.frontend.engine_supervisor import EngineSupervisor
    from octavo.frontend.flight_recordings import FlightRecordings
    from octavo.frontend.open_request import LedgerObserver, OpenRequest
    from octavo.media.item import MediaItem

StartEngine = Callable[["Config", "LedgerObserver | None"], Awaitable["EngineSupervisor"]]
_FOR_ALL = ("pause", "resume", "drain", "cancel_all", "reset_prefix_cache", "reset_statistics")
LOAD_RETRY_S = 5.0  # after a failure to load, requests fail with the same reason for this time
_log = logging.getLogger(__name__)


class ModelState(Enum):
    """Whether a model has an engine."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


class OnDemandModel:
    """One model, an EngineClient of its present engine. `acquire` loads it; `release` starts the timer of an idle one.

    `failure` is why it could not be loaded, or why its engine was given up. `on_loaded` is called with each new
    engine. `keep_alive_s` is how long it stays loaded without users; below 0 without an end.
    """

    def __init__(self, served: ServedModelConfig, models: ServedModels) -> None:
        self.name = served.name
        self.config = served.config
        self.state = ModelState.UNLOADED
        self.failure = ""
        self.engine: EngineSupervisor | None = None
        self.capacity: Capacity | None = None  # of the last engine
        self.on_loaded: Callable[[EngineSupervisor], None] | None = None
        self.keep_alive_s = models.settings.keep_alive_s
        self.num_users = 0
        self.num_loads = 0
        self.used_at = 0.0  # when it was last acquired or released, on the monotonic clock
        self.expires_at: float | None = None  # when it will be unloaded, on the wall clock; None while it has users
        self.is_wanted_off = False  # another model waits for its place
        self.models = models
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._retry_at = 0.0

    @property
    def files(self) -> str:
        """What names the model's files: token ids are valid as long as it is the same."""
        return f"{self.config.model.model}@{self.config.model.revision or ''}"

    @property
    def latest_end(self) -> float:
        """When the model is unloaded if no further request needs it, on the wall clock."""
        return time.time() + self.keep_alive_s if self.expires_at is None else self.expires_at

    @property
    def is_usable(self) -> bool:
        """True if a request need not wait for the model."""
        return self.state is ModelState.READY and not self.is_wanted_off

    # --- users

    async def acquire(self) -> Callable[[], None]:
        """Wait until the model is loaded, and keep it so; return the function that releases it, once.

        Raises ModelLoadError with the reason if it cannot be loaded.
        """
        if self.is_usable:
            return self.enter()
        if self.state is ModelState.FAILED and (wait_s := self._retry_at - time.monotonic()) > 0:
            raise self._load_error(wait_s)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.models.want(self)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release()  # it was loaded for this waiter at the moment of the cancellation
            raise
        return self._releaser()

    @property
    def is_waited_for(self) -> bool:
        """True if requests wait until the model is loaded."""
        return any(not waiter.done() for waiter in self._waiters)

    def enter(self) -> Callable[[], None]:
        """Use a model that is loaded; return the function that releases it."""
        self._enter()
        return self._releaser()

    def _enter(self) -> None:
        self.num_users += 1
        self.used_at = time.monotonic()
        self._idle.clear()
        self._stop_timer()

    def _releaser(self) -> Callable[[], None]:
        has_released = False

        def release() -> None:
            nonlocal has_released
            if not has_released:
                has_released = True
                self._release()

        return release

    def _release(self) -> None:
        self.num_users -= 1
        self.used_at = time.monotonic()
        if self.num_users == 0:
            self._idle.set()
            self._start_timer()

    def set_keep_alive(self, seconds: float) -> None:
        """Keep the model loaded for this time after its last user, until it is unloaded; below 0 without an end."""
        self.keep_alive_s = seconds
        if self.num_users == 0:
            self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        if self.state is ModelState.READY and not self.is_waited_for and self.keep_alive_s >= 0:
            self.expires_at = time.time() + self.keep_alive_s
            self._timer = asyncio.get_running_loop().call_later(self.keep_alive_s, self._expire)

    def _stop_timer(self) -> None:
        self.expires_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.state is ModelState.READY and self.num_users == 0:
            _log.info("model %s is unloaded: it had no request for %g s", self.name, self.keep_alive_s)
            self._begin_closing(ModelState.UNLOADING, ModelState.UNLOADED)

    # --- for ServedModels

    async def load(self, start: StartEngine, observer: LedgerObserver | None) -> None:
        """Start an engine and admit the waiting requests. Raises the error of its opening; the model is FAILED then."""
        self.state = ModelState.LOADING
        started_at = time.monotonic()
        try:
            engine = await start(self.config, observer)
        except BaseException as error:
            self.state = ModelState.UNLOADED
            if isinstance(error, (OctavoError, OSError)):
                self.state, self.failure = ModelState.FAILED, str(error)
                self._retry_at = time.monotonic() + LOAD_RETRY_S
            raise
        self.engine, self.state, self.failure = engine, ModelState.READY, ""
        self.num_loads += 1
        self.used_at = time.monotonic()
        _log.info("model %s is loaded, in %.1f s", self.name, self.used_at - started_at)
        self.capacity = engine.capacity
        if self.on_loaded is not None:
            self.on_loaded(engine)
        self._watching = asyncio.create_task(self._watch(engine), name=f"octavo-model-{self.name}")
        self.admit_waiters()

    def admit_waiters(self) -> None:
        """Let the waiting requests use the model, which is loaded."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._enter()
                waiter.set_result(None)
        if self.num_users == 0:
            self._start_timer()

    def refuse_waiters(self) -> None:
        """Fail the waiting requests with the reason of the failure."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(self._load_error(LOAD_RETRY_S))

    def _load_error(self, wait_s: float) -> ModelLoadError:
        return ModelLoadError(f"model {self.name} cannot be loaded: {self.failure}", retry_after_s=wait_s)

    async def unload(self) -> None:
        """Wait until the model has no users, then end its engine. Requests that arrive meanwhile wait. Idempotent."""
        self.is_wanted_off = True
        try:
            await self._idle.wait()
            if self.state is ModelState.READY:
                self._begin_closing(ModelState.UNLOADING, ModelState.UNLOADED)
            await self.closed()
        finally:
            self.is_wanted_off = False

    async def closed(self) -> None:
        """Wait until an engine that is being ended has ended."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def close(self) -> None:
        """End the engine with its requests, and fail the waiting ones. Idempotent."""
        self.failure = self.failure or "the server stops"
        self.refuse_waiters()
        if self.engine is not None:
            self._begin_closing(ModelState.UNLOADING, ModelState.UNLOADED)
        await self.closed()

    def _begin_closing(self, during: ModelState, after: ModelState) -> None:
        """Begin to end the engine; the state is `during` until it has ended, then `after`."""
        engine, self.engine, self.state = self.engine, None, during
        self._stop_timer()
        self.keep_alive_s = self.models.settings.keep_alive_s
        watching, self._watching = self._watching, None
        if watching is not None and watching is not asyncio.current_task():
            watching.cancel()

        async def close() -> None:
            try:
                if engine is not None:
                    await engine.close()
            finally:
                self.state = after

        self._closing = asyncio.create_task(close(), name=f"octavo-unload-{self.name}")

    async def _watch(self, engine: EngineSupervisor) -> None:
        """Mark the model as failed when its engine is given up; the next request loads it again."""
        await engine.failed.wait()
        _log.error("model %s: its engine is given up: %s", self.name, engine.failure)
        self.failure = engine.failure
        self._retry_at = time.monotonic() + LOAD_RETRY_S
        self._begin_closing(ModelState.FAILED, ModelState.FAILED)

    # --- EngineClient

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        """See EngineClient. The caller has acquired the model."""
        return await self.loaded_engine.submit(request, media)

    def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        """See EngineClient."""
        return self.loaded_engine.outputs(request_id, final_only, max_ids)

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """See EngineClient. A model that is not loaded has no requests."""
        return 0 if self.engine is None else self.engine.cancel(request_ids, reason, choice)

    async def statistics(self) -> Mapping[str, object]:
        """See EngineClient. Raises EngineDeadError if the model is not loaded."""
        return await self.loaded_engine.statistics()

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient. Raises EngineDeadError if the model is not loaded."""
        return await self.loaded_engine.control(verb, argument)

    @property
    def loaded_engine(self) -> EngineSupervisor:
        """The present engine. Raises EngineDeadError if the model is not loaded."""
        if self.engine is None:
            raise EngineDeadError(f"model {self.name} is not loaded ({self.state.value})")
        return self.engine

    def restore(self, requests: Iterable[OpenRequest]) -> None:
        """See EngineSupervisor.restore. The model is loaded."""
        self.loaded_engine.restore(requests)

    def trouble(self) -> str | None:
        """Return why the model answers no request now; None if it is in order, or would be loaded for one."""
        if self.state is ModelState.FAILED:
            return self.failure
        return None if self.engine is None else self.engine.trouble()

    def report(self) -> dict[str, object]:
        """Return the state, for `octavo admin status` and `octavo ps`."""
        own: dict[str, object] = {"state": self.state.value, "users": self.num_users, "loads": self.num_loads}
        if self.failure and self.state is ModelState.FAILED:
            own["failure"] = self.failure
        if self.expires_at is not None:
            own["expires_in_s"] = round(max(0.0, self.expires_at - time.time()), 1)
        if self.engine is not None:
            own |= {"processes": self.engine.processes, "engine": self.engine.report()}
        return own


class ServedModels:
    """The models of one server, by name, the default model first. Made in the event loop.

    Its verbs are those of an engine, as `octavo admin` uses them: about all loaded models, or, where only one can
    answer, about the default model. `failed` is never set: a model whose engine is given up leaves the others alone.
    `start` starts an engine, as EngineSupervisor.start does. `observer` sees the ledger of every engine.
    """

    def __init__(
        self,
        configs: Sequence[ServedModelConfig],
        start: StartEngine,
        observer: LedgerObserver | None = None,
    ) -> None:
        self.settings: ModelsConfig = configs[0].config.models
        self.models = {each.name: OnDemandModel(each, self) for each in configs}
        self.failed = asyncio.Event()
        self.failure = ""
        self._start = start
        self._observer = observer
        self._wanted: deque[OnDemandModel] = deque()
        self._loading: asyncio.Task[None] | None = None
        self._is_closing = False
        self._release_default: Callable[[], None] | None = None

    @property
    def default(self) -> OnDemandModel:
        """The model of requests that name none."""
        return next(iter(self.models.values()))

    @property
    def loaded(self) -> list[OnDemandModel]:
        """The models that take memory."""
        return [model for model in self.models.values() if model.state in (ModelState.READY, ModelState.UNLOADING)]

    def trouble(self) -> str | None:
        """Return a reason if no model can answer a request; a model that is not loaded would be loaded for one."""
        troubles = [model.trouble() for model in self.models.values()]
        return None if None in troubles else troubles[0]

    @property
    def capacity(self) -> Capacity:
        """The capacity of the default model's engine, which is loaded at the start."""
        assert self.default.capacity is not None
        return self.default.capacity

    @property
    def processes(self) -> dict[str, int]:
        """The pids of all engines: the default model's as of one engine, the others' with their model's name."""
        found: dict[str, int] = {}
        for model in self.loaded:
            if model.engine is not None:
                suffix = "" if model is self.default else f" {model.name}"
                found |= {role + suffix: pid for role, pid in model.engine.processes.items()}
        return found

    def report(self) -> dict[str, object]:
        """Return the default engine's report, and the state of each model."""
        engine = self.default.engine
        own = {"state": self.default.state.value} if engine is None else engine.report()
        return {**own, "models": {model.name: model.report() for model in self.models.values()}}

    def kill(self, why: str) -> None:
        """Kill all engines on purpose; see EngineSupervisor.kill."""
        for engine in self._engines():
            engine.kill(why)

    def flights(self) -> dict[str, FlightRecordings]:
        """Return what the flight recorders of all loaded engines keep, by model and replica."""
        engines = {model.name: model.engine for model in self.loaded if model.engine is not None}
        return {f"{name} {key}": kept for name, engine in engines.items() for key, kept in engine.flights().items()}

    def cancel(self, request_ids: Iterable[str]) -> int:
        """End these requests, whichever model they are of; return how many were open."""
        ids = tuple(request_ids)
        return sum(engine.cancel(ids) for engine in self._engines())

    async def statistics(self) -> Mapping[str, object]:
        """Return the default engine's statistics. Raises EngineDeadError if it is not loaded."""
        return await self.default.statistics()

    async def control(self, verb: Verb, argument: str = "") -> object:
        """Run a verb on all engines, and return the default one's answer, or the sum of numbers; see EngineClient.

        `argument` of a verb that only reads is for the default engine, the only one that it is run on.
        """
        if verb not in _FOR_ALL:
            return await self.default.control(verb, argument)
        answers = [await engine.control(verb, argument) for engine in self._engines()]
        numbers = [answer for answer in answers if isinstance(answer, int) and not isinstance(answer, bool)]
        return sum(numbers) if numbers else True

    def restore(self, requests: Iterable[OpenRequest]) -> None:
        """Add open requests of the default model; see EngineSupervisor.restore."""
        self.default.restore(requests)

    def _engines(self) -> list[EngineSupervisor]:
        return [model.engine for model in self.models.values() if model.engine is not None]

    async def start_default(self) -> None:
        """Load the default model and keep it until `begin_timers`. Raises ModelLoadError."""
        self._release_default = await self.default.acquire()

    def begin_timers(self) -> None:
        """Let the default model be unloaded when it is idle."""
        if self._release_default is not None:
            self._release_default()

    def want(self, model: OnDemandModel) -> None:
        """Load the model once it is its turn."""
        if self._is_closing:
            model.failure = "the server stops"
            model.refuse_waiters()
            return
        if model not in self._wanted:
            self._wanted.append(model)
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load_wanted(), name="octavo-models")

    async def close(self) -> None:
        """End all engines, after their requests were answered. Idempotent."""
        self._is_closing = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await asyncio.gather(*(model.close() for model in self.models.values()))

    async def _load_wanted(self) -> None:
        while self._wanted:
            model = self._wanted[0]
            try:
                await self._load(model)
            except (OctavoError, OSError) as error:
                _log.warning("model %s cannot be loaded: %s", model.name, error)
                model.refuse_waiters()
            except Exception as error:  # the shell: without this task no model would be loaded any more
                _log.exception("model %s cannot be loaded", model.name)
                model.state, model.failure = ModelState.FAILED, f"{type(error).__name__}: {error}"
                model.refuse_waiters()
            finally:
                self._wanted.popleft()
            if model.is_waited_for and model.state is not ModelState.READY:
                self._wanted.append(model)  # a request arrived between its failure and now

    async def _load(self, model: OnDemandModel) -> None:
        """Load a model, after what takes its place has been unloaded. Raises the error of its opening."""
        for other in self.models.values():
            await other.closed()  # its memory is free then
        if model.state is ModelState.READY:
            model.admit_waiters()
        if not model.is_waited_for:
            return
        most = self.settings.max_loaded_models
        while most is not None and len(self.loaded) >= most:
            await self._unload_one(self.loaded)
        while True:
            try:
                await model.load(self._start, self._observer)
                return
            except CapacityError:
                idle = [other for other in self.loaded if other.num_users == 0]
                if not idle:
                    raise
                model.state = ModelState.LOADING
            await self._unload_one(idle)  # memory lacks: perhaps it is enough without a model that is idle

    async def _unload_one(self, loaded: Sequence[OnDemandModel]) -> None:
        """Unload the model that was used least recently, an idle one if there is one."""
        victim = min(loaded, key=lambda model: (model.num_users > 0, model.used_at))
        _log.info("model %s is unloaded: another model needs its place", victim.name)
        await victim.unload()
