"""Runs the api process's services once the engine is ready: the application, the admin socket, the start-up report.

Owns: connecting the services; the order of starting and ending them; the status line while requests run.
Does not: start or close the engine, or open the listening socket.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.artifacts.encoder_spec import EncoderSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.assembly import find_files, load_text
from octavo.cli.admin import admin_verbs
from octavo.cli.terminal import say, warn_limits
from octavo.config import Config
from octavo.errors import ConfigError, EngineDeadError
from octavo.executors.protocol import Capacity
from octavo.fleet.served_models import ServedModels
from octavo.frontend.api_supervisor import ALIVE, ALIVE_S, ANSWERED, EXIT_ENGINE_FAILED, READY
from octavo.frontend.engine_supervisor import EngineSupervisor
from octavo.frontend.journal import Journal
from octavo.frontend.sessions import Sessions
from octavo.machine import is_loopback
from octavo.observe.statistics import STATUS_LINE_S, StatusLine
from octavo.server.admin import AdminServer, Verb
from octavo.server.app import create_app
from octavo.server.context import Context, add_models, follow_capacity
from octavo.server.http.lifecycle import Lifecycle
from octavo.server.http.listener import url_of
from octavo.server.http.server import HttpServer
from octavo.server.reply import load_models_of, restore_runs
from octavo.text.text_model import TextModel

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.cli.api_process import ApiProcess, ApiTask, Engine
    from octavo.server.http.keys import KeyRing


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model's files and its TextModel (tokenizer and chat template)."""

    files: ModelFiles
    text: TextModel


def load(config: Config) -> Loaded:
    """Find the model; load its tokenizer and chat template. Raises UnknownModelError, ModelFileError."""
    files = find_files(config)
    return Loaded(files, load_text(config, files))


async def serve(
    api: ApiProcess, engine: Engine, journal: Journal | None, loaded: Sequence[Loaded], started_at: float
) -> int:
    """Serve until asked to stop (0), or until the engine has failed for good (EXIT_ENGINE_FAILED)."""
    task, config, report = api.task, api.task.config, api.report
    warn_limits(config, engine.capacity)
    trouble = None if config.serving.in_process else engine.trouble
    lifecycle = Lifecycle(engine_trouble=trouble, on_answered=lambda: report(ANSWERED))
    app = _make_app(task, engine, loaded, lifecycle)
    context = app.state.context
    if isinstance(engine, EngineSupervisor):
        follow_capacity(engine, context.queue)
    await context.adapters.restore()
    restored = (0, 0) if journal is None else await _restore(context, journal, engine)
    server = HttpServer(app, api.listener, lifecycle, config.serving.drain_timeout_s, config.web)
    url = url_of(api.listener, config.web)
    async with (
        _admin_server(Path(task.admin_socket), admin_verbs(api, engine, server, context, url)),
        _background(None if task.is_quiet else _print_status(engine)),
        _background(_report_alive(api)),
        _background(context.batches.run()),
        _key_reloads(context.keys, config.serving.api_key_file),
    ):
        if not task.is_quiet:
            if task.run_number == 1:
                say(*startup_report(config, loaded[0].files, engine.capacity), *_models_report(task))
                say(*_adapters_report(context), *_fleet_report(api), *_journal_report(*restored))
                say(*call_report(task, context.model, url, context.text.spec.encoder))
            else:
                say(*_fleet_report(api), *_journal_report(*restored), f"serving   {url}/v1 again")
        for line in detail_report(task, engine, loaded[0].files, time.perf_counter() - started_at):
            _log.info("%s", line)
        gc.freeze()  # garbage collections skip the objects that exist now, which take 0.1 s to traverse
        report(READY)
        if isinstance(engine, ServedModels):
            engine.begin_timers()
        try:
            return await _run_until_failed(server, engine, lifecycle)
        finally:
            await asyncio.to_thread(context.tracer.close)


def _make_app(task: ApiTask, engine: Engine, loaded: Sequence[Loaded], lifecycle: Lifecycle) -> Starlette:
    config = task.config
    if not isinstance(engine, ServedModels):
        sessions = Sessions(engine, loaded[0].text, config.execution.seed, capacity=engine.capacity)
        return create_app(sessions, sessions.text, config, engine.statistics, lifecycle=lifecycle)
    served = [
        (Sessions(model, each.text, model.config.execution.seed, capacity=model.capacity), model.config)
        for model, each in zip(engine.models.values(), loaded, strict=True)
    ]
    sessions = served[0][0]
    app = create_app(sessions, sessions.text, config, engine.statistics, lifecycle=lifecycle)
    add_models(app.state.context, served)
    return app


async def _restore(context: Context, journal: Journal, engine: Engine) -> tuple[int, int]:
    """Continue the journal's runs; return the number of open and of ended ones."""
    release = await load_models_of(context, journal)
    try:
        return restore_runs(context, journal, engine.restore)
    finally:
        release()


async def _run_until_failed(server: HttpServer, engine: Engine, lifecycle: Lifecycle) -> int:
    """Serve; return 0 when asked to stop, EXIT_ENGINE_FAILED when the engine fails."""
    serving = asyncio.create_task(server.run())
    failing = asyncio.create_task(engine.failed.wait())
    try:
        await asyncio.wait((serving, failing), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
            return 0
        say(f"error: {engine.failure}")
        lifecycle.fail()
        server.stop()
        await serving
        return EXIT_ENGINE_FAILED
    finally:
        for task in (serving, failing):
            task.cancel()
        await asyncio.gather(serving, failing, return_exceptions=True)


@asynccontextmanager
async def _admin_server(path: Path, verbs: dict[str, Verb]) -> AsyncIterator[None]:
    admin = AdminServer(path, verbs)
    await admin.open()
    try:
        yield
    finally:
        await admin.close()


@asynccontextmanager
async def _background(work: Coroutine[object, object, None] | None) -> AsyncIterator[None]:
    """Run `work` as a task while the body runs; do nothing for None."""
    task = None if work is None else asyncio.create_task(work)
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _key_reloads(keys: KeyRing, file: str | None) -> AsyncIterator[None]:
    """While the body runs, reload the key file, if there is one, at SIGHUP (as `octavo admin reload_keys`)."""
    if file is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _reload, keys)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _reload(keys: KeyRing) -> None:
    try:
        say(keys.reload())
    except ConfigError as error:
        say(f"the keys are unchanged: {error}")


async def _report_alive(api: ApiProcess) -> None:
    """Report to the supervisor at intervals that this event loop runs."""
    while True:
        api.report(ALIVE)
        await asyncio.sleep(ALIVE_S)


async def _print_status(engine: Engine) -> None:
    status = StatusLine()
    while True:
        try:
            line = status.line(await engine.statistics(), time.monotonic())
        except EngineDeadError:
            line = None  # the engine may be restarting
        if line is not None:
            say(line)
        await asyncio.sleep(STATUS_LINE_S)


# --- the start-up report


def startup_report(config: Config, files: ModelFiles, capacity: Capacity) -> Iterator[str]:
    """Yield lines about the model, memory, and what the user enabled or disabled."""
    revision = f" at {files.revision[:12]}" if files.revision else ""
    threads = f", {capacity.num_threads} thread{'s' * (capacity.num_threads > 1)}" if capacity.device == "cpu" else ""
    code = "" if capacity.quantization == "none" else f"{capacity.quantization} "
    weights = f"{capacity.weight_bytes / 2**20:,.0f} MiB of {code}weights"
    if files.kind == "scripted":
        weights = f"no weights: answers are those of {files.weights[0]}"
    tokens = capacity.num_blocks[0] * capacity.block_size
    pool_bytes = _bytes_of(capacity, capacity.num_blocks)
    yield f"model     {files.name}{revision}, {weights}, {capacity.dtype}, {capacity.device}{threads}"
    encoder = read_model_spec(files).encoder if capacity.is_encoder else None
    if encoder is not None:
        yield f"encoder   {encoder.purpose}; texts of at most {capacity.max_model_len:,} tokens, nothing is cached"
    else:
        yield (
            f"KV pool   {tokens:,} tokens, {pool_bytes / 2**20:,.0f} MiB: "
            f"{tokens / capacity.max_model_len:.1f} requests of full length ({capacity.max_model_len:,}), "
            f"{capacity.num_slots} running at most"
        )
    if capacity.ranks:
        hosts = ", ".join(dict.fromkeys(rank.where for rank in capacity.ranks))
        sizes = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
        yield f"ranks     {len(capacity.ranks)} ({sizes[0]} tensor x {sizes[1]} pipeline) on {hosts}"
    if capacity.host_blocks:
        host_tokens = capacity.host_blocks[0] * capacity.block_size
        host_bytes = _bytes_of(capacity, capacity.host_blocks)
        yield f"host KV   {host_tokens:,} tokens, {host_bytes / 2**20:,.0f} MiB"
    if config.recording.record is not None:
        contents = "with token ids" if config.recording.record_text else "lengths and digests, no token ids"
        yield f"recording {config.recording.record}, at most {config.recording.record_bytes:,} bytes: {contents}"
    for off in _features_off(config):
        yield f"off       {off}"


def _bytes_of(capacity: Capacity, num_blocks: tuple[int, ...]) -> int:
    return sum(count * group.block_bytes for count, group in zip(num_blocks, capacity.groups, strict=True))


def _features_off(config: Config) -> Iterator[str]:
    if not config.cache.enable_prefix_caching:
        yield "prefix caching (--no-enable-prefix-caching)"
    if not config.scheduling.chunked_prefill:
        yield "chunked prefill (--no-enable-chunked-prefill)"
    if config.serving.in_process:
        yield "crash protection (--in-process)"
    if not config.serving.has_keys and not is_loopback(config.serving.host):
        yield "authentication (no --api-key): ANYONE who can connect can use it"


def _models_report(task: ApiTask) -> Iterator[str]:
    """Yield a line about models that are loaded on demand."""
    if task.models:
        first, *others = (each.name for each in task.models)
        later = f"; when a request needs them: {', '.join(others)}" if others else ""
        after_s = task.config.models.keep_alive_s
        end = "never unloaded" if after_s < 0 else f"unloaded after {after_s:g} s without a request"
        yield f"models    {first} is loaded{later}; {end}"


def _adapters_report(context: Context) -> Iterator[str]:
    """Yield a line about adapters, if there can be any."""
    if context.adapters.is_enabled:
        names = ", ".join(adapter.name for adapter in context.adapters) or "none"
        yield f"adapters  {names}  (octavo admin load_adapter NAME=PATH, unload_adapter NAME)"


def detail_report(task: ApiTask, engine: Engine, files: ModelFiles, startup_s: float) -> Iterator[str]:
    """Yield lines for the log about the start, the processes and the effect of a crash."""
    yield f"started in {startup_s:.1f} s with {files.weights[0] if files.kind == 'gguf' else files.root}"
    if task.config.serving.in_process:
        yield f"process {os.getpid()}, engine included; no crash protection (--in-process): a crash ends the server"
    else:
        others = "".join(f", {role} {pid}" for role, pid in engine.processes.items())
        yield f"processes: supervisor {task.supervisor_pid}, api {os.getpid()}{others}"
        standby = "a standby takes over" if task.config.serving.standby else "no standby (--standby)"
        yield f"an engine that dies or hangs is replaced and open requests go on; {standby}"
    yield f"admin socket {task.admin_socket}"


def _fleet_report(api: ApiProcess) -> Iterator[str]:
    """Yield lines about the replicas of `octavo fleet`."""
    if api.front is not None:
        yield from api.front.lines()
        yield "change    octavo admin scale N, roll, drain_replica NUMBER, remove_replica NUMBER"


def call_report(task: ApiTask, model: str, url: str, encoder: EncoderSpec | None = None) -> Iterator[str]:
    """Yield lines with the server's URLs, how to stop it, and an example command."""
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if task.config.serving.has_keys else ""
    yield f"serving   {url}/v1  (documentation: /docs)"
    yield f"open      {url}/dashboard" if encoder is not None else f"open      {url}/  (a chat; /dashboard: the engine)"
    yield f"stop      Ctrl-C, or octavo stop {task.supervisor_pid or os.getpid()}"
    path, body = "v1/chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if encoder is not None:
        pair = '"query": "Hello", "documents": ["Good morning", "Rain"]'
        path, body = ("v1/rerank", pair) if len(encoder.labels) == 1 else ("v1/embeddings", '"input": "Hello"')
        path = "classify" if len(encoder.labels) > 1 else path
    sent = f'{{"model": "{model}", {body}}}'
    yield f"try       curl {url}/{path} -H 'Content-Type: application/json'{key} -d '{sent}'"


def _journal_report(num_resumed: int, num_answers: int) -> Iterator[str]:
    """Yield a line about the requests and answers restored from the journal, if there are any."""
    if num_resumed + num_answers:
        yield f"journal: {num_resumed} requests go on, {num_answers} answers are kept for a retry"
