"""The composition root: opens an engine from a Config. Only this module connects executors and the engine loop.

Owns: the order of opening; defaults that depend on the device; LLM and AsyncLLM.
Does not: run models, schedule or serve. Importing this module does not load torch; opening an engine does.
`python -m octavo.assembly` is the engine process, and with --rank any rank of an engine but its first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo import machine
from octavo.artifacts.fingerprint import model_fingerprint, text_fingerprint, tokenizer_fingerprint
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.artifacts.script import read_script
from octavo.config import Config
from octavo.config.sources import config_from_keywords
from octavo.core.limits import Limits
from octavo.core.request import Want
from octavo.core.scheduler import Scheduler
from octavo.engine.adapters import EngineAdapters
from octavo.engine.draft_checks import check_draft_model, check_rejection, is_paced, looks_up
from octavo.engine.draft_pace import DraftPace, PacedLookups
from octavo.engine.limits import configured_limits, read_tenant_weights
from octavo.engine.loop import Clock, EngineLoop
from octavo.engine.observation import observe_engine
from octavo.engine.parent import end_with_parent
from octavo.engine.process_side import run_engine_process
from octavo.engine.warm_up import warm_up
from octavo.errors import ConfigError
from octavo.executors import limit_spinning
from octavo.executors.draft_model import DraftModel, RejectionExecutor
from octavo.executors.pool_use import pool_use
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec, Fingerprint, MediaExecutor
from octavo.executors.ranks.executor import RankedExecutor
from octavo.executors.ranks.frames import Begin, Channel
from octavo.executors.ranks.group import RankGroup
from octavo.executors.ranks.hosts import RankHosts
from octavo.executors.ranks.process import OwnRank, RankServer
from octavo.executors.scripted_executor import ScriptedExecutor
from octavo.fleet.security import LinkSecurity
from octavo.frontend.adapters import AdapterRegistry
from octavo.frontend.async_llm import AsyncEngine
from octavo.frontend.flight_recordings import FlightRecordings
from octavo.frontend.local_client import LocalClient
from octavo.frontend.offline import OfflineEngine
from octavo.frontend.open_request import LedgerObserver, OpenRequest
from octavo.frontend.sessions import Sessions
from octavo.grammar.bank import GrammarBank
from octavo.grammar.vocabulary import Vocabulary
from octavo.observe.log import set_up_log
from octavo.plugins import find_policy
from octavo.text.text_model import TextModel
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.observe.recording.flight import EngineRecorders
    from octavo.simulator.costs.fitted import DriftMonitor

DRAFT_POOL_LEN = 2048  # tokens of each lane that the draft model's pool holds, if all lanes are used
_NO_STANDBY = "--standby opens no engine beside one on a device, which has no room for a second copy of the weights"
WATCH_S = 0.5  # interval of the check that an in-process engine is alive
DEVICE_DEFAULTS = {"cpu": (512, 32), "cuda": (8192, 256)}  # maximum tokens per step, maximum sequences


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine in this process: its loop, client, sessions, text model (tokenizer, chat template) and capacity."""

    loop: EngineLoop
    client: LocalClient
    sessions: Sessions
    text: TextModel
    capacity: Capacity


def build_local(config: Config) -> LocalEngine:
    """Open an engine in this process. Close its client when done. Raises what open_engine and load_text raise."""
    files = find_files(config)
    with opening(files), ThreadPoolExecutor(1) as pool:  # the tokenizer loads while torch loads
        loading = pool.submit(load_text, config, files)
        loop, capacity = open_engine(config, files, lambda: loading.result().tokenizer)
        text = loading.result()
    client = LocalClient(loop)
    return LocalEngine(loop, client, Sessions(client, text, config.execution.seed, capacity=capacity), text, capacity)


class InProcessEngine(LocalClient):
    """An engine in the server's process (--in-process). It has EngineSupervisor's interface, but never restarts."""

    processes: Mapping[str, int] = {}

    def __init__(self, loop: EngineLoop, capacity: Capacity) -> None:
        super().__init__(loop)
        self.capacity = capacity
        self.failed = asyncio.Event()
        self.failure = ""
        self._watching = asyncio.create_task(self._watch(loop), name="octavo-engine-watch")

    @classmethod
    async def start(cls, config: Config, observer: LedgerObserver | None = None) -> InProcessEngine:
        """Open an engine in this process; `observer` is unused because there is no ledger."""
        return cls(*await asyncio.to_thread(open_engine, config))

    def trouble(self) -> str | None:
        """Return the reason why the engine makes no progress now, or None."""
        return self.failure or None

    def report(self) -> dict[str, object]:
        """Return the epoch and the number of restarts, which are constant here."""
        return {"epoch": 1, "restarts": 0}

    def restore(self, requests: Iterable[OpenRequest]) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError("an engine in the server's own process (--in-process) has no journal")

    def flights(self) -> dict[str, FlightRecordings]:
        """Refuse. Raises ConfigError."""
        raise ConfigError("an engine in the server's own process (--in-process) has no flight recorder; give --record")

    def kill(self, why: str) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError("the engine is in the server's own process (--in-process), which would end with it")

    async def close(self) -> None:
        """Answer all open requests, then end the engine."""
        self._watching.cancel()
        await super().close()

    async def _watch(self, loop: EngineLoop) -> None:
        while loop.is_alive:
            await asyncio.sleep(WATCH_S)
        self.failure = f"the engine ended ({loop.failure or 'it was stopped'}); see the lines above"
        self.failed.set()


def opening(files: ModelFiles) -> AbstractContextManager[None]:
    """Return a context that raises CapacityError, with sizes and a remedy, if loading the model runs out of memory."""
    return machine.needing_memory(files.name, sum(path.stat().st_size for path in files.weights))


def find_files(config: Config) -> ModelFiles:
    """Find the configured model. Raises UnknownModelError, ModelFileError."""
    return resolve_model(config.model.model, config.model.revision, config.model.offline)


def load_text(config: Config, files: ModelFiles) -> TextModel:
    """Load the tokenizer and the chat template. Raises ModelFileError, CapacityError."""
    with opening(files):
        return TextModel.load(
            files,
            config.chat.chat_template,
            trust_template=config.chat.trust_template,
            special_tokens_in_text=config.chat.special_tokens_in_text,
        )


def open_engine(
    config: Config,
    files: ModelFiles | None = None,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
    *,
    is_own_process: bool = False,
) -> tuple[EngineLoop, Capacity]:
    """Load the model, size the pool, and return a loop (not started).

    The first request with a grammar calls `load_tokenizer` (default: load the model's tokenizer).
    With `is_own_process`, this process runs only the engine, so a scripted model may kill the process.
    Raises ConfigError, CapacityError, ModelFileError.
    """
    find_policy(config.scheduling.policy)  # an unknown policy fails before the model is loaded
    if config.recording.record is not None:
        from octavo.observe.recording.recorder import prepare_folder

        prepare_folder(Path(config.recording.record))
    drift = _read_baseline(config)
    files = files or find_files(config)
    check_rejection(config, files)
    # An OpenMP library keeps a team of threads for each thread that used it. When the teams' threads outnumber the
    # cores, no thread spins, and steps were a fifth slower. The thread that opens the executor therefore ends here.
    with opening(files), ThreadPoolExecutor(1, "octavo-open") as pool:
        drafting = pool.submit(_open_draft_model, config, files)  # first: the pool takes the memory that is left
        opened = pool.submit(_open_executor, config, files, is_own_process)
        digests = (model_fingerprint(files), tokenizer_fingerprint(files)) if is_own_process else ("", "")
        draft_model = drafting.result()
        executor, device, capacity = opened.result()
        notes = (*capacity.notes, _NO_STANDBY) if config.serving.standby and device != "cpu" else capacity.notes
        capacity = replace(capacity, fingerprint=_fingerprint(config, capacity, digests), notes=notes)
    if config.speculation.speculate_sampling == "rejection":
        assert isinstance(executor, RejectionExecutor), "see check_rejection"
        executor.verify_by_rejection(None if draft_model is None else draft_model.distribution)
    adapters = _open_adapters(config, executor, capacity)
    sizes = limits(config, capacity, device)
    clock = Clock()
    drafts = PacedLookups(DraftPace()) if sizes.has_paced_lookup else draft_model
    recorders = _open_recorders(config, sizes, capacity, clock, is_own_process)
    scheduler = Scheduler(sizes, None if recorders is None else recorders.tap, drafts=drafts)
    load = load_tokenizer or (lambda: load_text(config, files).tokenizer)
    bank = GrammarBank(Vocabulary(load, capacity.vocab_size)) if capacity.has_masks else None
    loop = EngineLoop(scheduler, executor, clock=clock, depth=plans_in_flight(config, capacity), bank=bank)
    if adapters is not None:
        adapters.attach(loop)
    if isinstance(executor, RankedExecutor):
        executor.group.lost = loop.fail
        loop.sections["ranks"] = executor.report
    if is_own_process and files.kind != "scripted":  # a scripted model has no kernels, and may end the process
        wants = Want.POOL if capacity.is_encoder else Want.SAMPLE
        loop.warm_up = partial(warm_up, sizes, executor, capacity.has_masks, clock.now, wants)
    if capacity.media:
        loop.sections["media"] = cast(MediaExecutor, executor).media_report
    if drafts is not None:
        loop.watch(drafts)
        loop.closers.extend([] if draft_model is None else [draft_model.close])
        loop.sections["draft_model" if draft_model is not None else "lookups"] = drafts.report
    if recorders is not None:
        recorders.join(scheduler.save, loop.sections, loop.closers)
        loop.attach_flight = recorders.attach
    if drift is not None:
        loop.watch(drift)
        loop.sections["drift"] = drift.summary
    name = config.model.shown_name(files.name)
    read_pools = partial(pool_use, scheduler) if config.statistics.memory_analysis else None
    observe_engine(loop, scheduler, config.statistics, name, capacity.device, read_pools)
    return loop, capacity


def plans_in_flight(config: Config, capacity: Capacity) -> int:
    """Return how many plans may be in flight: 2 beside an accelerator, unless there are drafts, which need ids."""
    has_drafts = config.speculation.draft_model is not None or looks_up(config, capacity)
    overlaps = capacity.device.startswith("cuda") and not has_drafts
    return max(config.execution.depth or 1 + overlaps, config.parallel.pipeline_parallel_size)


def _open_adapters(config: Config, executor: Executor, capacity: Capacity) -> EngineAdapters | None:
    """Load the configured adapters; None if the engine is to have none. Raises ConfigError, ModelFileError."""
    if not config.adapters.is_enabled:
        return None
    try:
        if capacity.decoder not in ("native", "torch"):
            raise ConfigError(
                f"adapters need the native or the torch decoder, on one device; this engine's is "
                f"{capacity.decoder or None}: leave out --enable-lora and --lora-modules"
            )
        return EngineAdapters(executor, config.adapters)
    except BaseException:
        executor.close()
        raise


def _read_baseline(config: Config) -> DriftMonitor | None:
    """Return a sink that compares step times with the configured baseline; None without one. Raises ConfigError."""
    if config.statistics.drift_baseline is None:
        return None
    from octavo.simulator.costs.fitted import DriftMonitor, load_fit  # this import takes a tenth of a cold start

    return DriftMonitor(load_fit(config.statistics.drift_baseline))


def _open_recorders(
    config: Config, sizes: Limits, capacity: Capacity, clock: Clock, is_own_process: bool
) -> EngineRecorders | None:
    """Return what records the engine's decisions; None if nothing does. Raises ConfigError."""
    if config.recording.record is None and not is_own_process:
        return None  # the import takes time
    from octavo.observe.recording.flight import Header, open_recorders, recorded_settings

    name, settings = config.model.shown_name(config.model.model), recorded_settings(config)
    header = Header(name, sizes, plans_in_flight(config, capacity), capacity.device, settings=settings)
    return open_recorders(config, header, clock.now, is_own_process)


def _fingerprint(config: Config, capacity: Capacity, digests: tuple[str, str]) -> Fingerprint:
    """Return the fingerprint of an opened engine. Threads count only if the decoder's sums depend on them."""
    imatrix = config.model.imatrix
    about = {
        "octavo": importlib.metadata.version("octavo"),
        "device": capacity.device,
        "dtype": capacity.dtype,
        "quantization": capacity.quantization,
        "kv dtype": config.cache.kv_cache_dtype,
        "decoder": capacity.decoder,
        "numerics": config.execution.numerics,
        "attention": config.execution.attention,
        "tp invariant": config.parallel.tp_invariant,
        "ranks": 1 if config.parallel.tp_invariant else config.parallel.tensor_parallel_size,
        "threads": capacity.num_threads if capacity.decoder in ("torch", "transformers") else "any",
        "imatrix": imatrix and text_fingerprint([Path(imatrix).read_bytes()]),
    }
    if capacity.decoder == "transformers":
        about["transformers"] = importlib.metadata.version("transformers")
    if capacity.device == "cpu":
        facts = machine.look()
        about |= {"cpu": facts.architecture, "features": " ".join(sorted(facts.features))}
    text = ", ".join(f"{name} {value}" for name, value in about.items())
    return Fingerprint(*digests, text_fingerprint([text]), text)


def check_ranks(config: Config, files: ModelFiles) -> None:
    """Raise ConfigError for an encoder that is to be divided among ranks."""
    parallel = config.parallel
    if (parallel.num_ranks > 1 or parallel.tp_invariant) and files.kind == "hf":
        if read_model_spec(files).encoder is None:
            return
        sizes = f"{parallel.tensor_parallel_size} and {parallel.pipeline_parallel_size}"
        raise ConfigError(
            f"tensor and pipeline parallel sizes are {sizes}, but an encoder is not divided among ranks; give 1 and 1, "
            "and leave out --tp-invariant"
        )


def _open_executor(config: Config, files: ModelFiles, is_own_process: bool) -> tuple[Executor, str, Capacity]:
    executor: Executor
    check_ranks(config, files)
    if config.parallel.num_ranks > 1:
        executor, device = create_ranked(config, files, is_own_process)
    elif files.kind == "scripted":
        executor, device = create_scripted(files, is_own_process), "cpu"
    elif config.parallel.tp_invariant:
        executor, device = _ranks_module().run_alone(config, files, read_model_spec(files))
    else:
        executor, device = create_executor(config, files, read_model_spec(files))
    try:
        return executor, device, executor.open(executor_spec(config, device))
    except BaseException:
        executor.close()  # ends the processes of other ranks
        raise


def find_draft_model(config: Config, files: ModelFiles) -> tuple[Config, ModelFiles] | None:
    """Return the settings and files of the draft model, if one is configured. Raises ConfigError, ModelFileError."""
    speculation, drafts = config.speculation, check_draft_model(config, files)
    if drafts is None or speculation.draft_model is None:
        return None
    execution = replace(config.execution, decoder="auto", attention="auto", numerics="auto")
    name, wanted = speculation.draft_model, speculation.speculate_quantization
    model = replace(config.model, model=name, revision=None, quantization=wanted, dtype="auto", imatrix=None)
    return replace(config, model=model, execution=execution), drafts


def draft_sizes(config: Config, spec: ModelSpec, device: str) -> ExecutorSpec:
    """Return the sizes of a draft model's executor."""
    rows, most = config.speculation.speculate_max_rows, spec.max_model_len
    length = min(most, config.model.max_model_len or most)
    return ExecutorSpec(
        max_sequences=rows,
        max_batch_tokens=config.scheduling.max_batch_tokens or DEVICE_DEFAULTS[device][0],
        block_size=config.cache.block_size,
        max_model_len=length,
        pool_tokens=max(length, rows * min(length, DRAFT_POOL_LEN)),
    )


def _open_draft_model(config: Config, files: ModelFiles) -> DraftModel | None:
    """Load the draft model, if one is configured. Raises ConfigError, and what _open_executor raises."""
    if (found := find_draft_model(config, files)) is None:
        return None
    settings, drafts = found
    spec = read_model_spec(drafts)
    executor, device = create_executor(settings, drafts, spec, True)
    sizes, vocab_size = draft_sizes(settings, spec, device), read_model_spec(files).vocab_size
    has_ngrams = config.speculation.has_ngrams
    capacity, chunk = executor.open(sizes), sizes.max_batch_tokens
    draft_model = DraftModel(executor, capacity, DraftPace(), vocab_size, chunk, has_ngrams)
    if config.speculation.speculate_sampling == "rejection":
        draft_model.draw_for_rejection()
    return draft_model


def create_ranked(config: Config, files: ModelFiles, is_own_process: bool) -> tuple[RankedExecutor, str]:
    """Start the other ranks; return the executor of rank 0, and the device's kind. Raises ConfigError, OSError."""
    num_local = config.parallel.num_ranks // config.parallel.nnodes
    group = RankGroup(num_local - 1, may_exit=is_own_process)
    group.start()  # first, so that the other processes import torch while this one does
    try:
        host, device, store, port = "127.0.0.1", "cpu", None, 0
        if config.parallel.nnodes > 1:
            host = config.parallel.master_addr
            group.peers += rank_hosts(config, files).accept()
        if files.kind != "scripted":
            device, store, port = _ranks_module().serve_store(host, config.execution.device)
        execution = replace(config.execution, device=device)  # no rank chooses otherwise
        shown = replace(Config(), model=config.model, execution=execution, parallel=config.parallel)
        begin = Begin(0, num_local, shown, executor_spec(config, device), host, port)
        return RankedExecutor(config.parallel, group, begin, partial(make_rank, store=store)), device
    except BaseException:
        group.close()
        raise


def rank_hosts(config: Config, files: ModelFiles) -> RankHosts:
    """Return the side of this host in an engine on several hosts. Raises ConfigError."""
    if config.serving.standby:
        raise ConfigError("--standby needs a second engine's ranks on all hosts; leave it out with --nnodes")
    token = LinkSecurity.of(config.link, Path()).token
    if token is None:
        raise ConfigError(
            "--nnodes needs a token that all hosts share; set OCTAVO_FLEET_TOKEN or --fleet-token-file to the same "
            "secret on all hosts, such as openssl rand -hex 16 makes"
        )
    return RankHosts(config.parallel, token, model_fingerprint(files), importlib.metadata.version("octavo"))


def make_rank(begin: Begin, store: Any = None) -> OwnRank:
    """Return one rank's executor in this process; waits until all ranks have joined. Raises what create_executor does.

    `store` is the torch.distributed store that this process serves; None = connect to rank 0's.
    """
    files = find_files(begin.config)
    if files.kind == "scripted":
        return OwnRank(create_scripted(files))
    own: OwnRank = _ranks_module().join_rank(begin, files, read_model_spec(files), store)
    return own


def _ranks_module() -> Any:
    """Return octavo.executors.ranks.joined, which loads torch. Raises ConfigError if torch is missing."""
    limit_spinning()
    with machine.needing_torch():
        from octavo.executors.ranks import joined
    return joined


def create_executor(config: Config, files: ModelFiles, spec: ModelSpec, is_draft: bool = False) -> tuple[Executor, str]:
    """Return the executor for the configured device, and the device's kind. Raises ConfigError if torch is missing."""
    limit_spinning()
    with machine.needing_torch():
        from octavo.executors import device_choice, encoder_executor, loading, torch_executor  # they load torch

    model, execution = config.model, config.execution
    if is_draft:
        model = replace(model, quantization=loading.draft_quantization(files, spec, execution, model))
    kind = torch_executor.TorchExecutor if spec.encoder is None else encoder_executor.EncoderExecutor
    return kind(files, spec, execution, model), device_choice.choose_device(execution.device).type


def create_scripted(files: ModelFiles, can_die: bool = False) -> ScriptedExecutor:
    """Return the executor of a scripted model."""
    return ScriptedExecutor(read_script(files.weights[0]), can_die=can_die)


def remove_packed(folder: Path, sources: Path) -> int:
    """Remove the packed weights in `folder` that were made from files below `sources`; return their bytes."""
    from octavo.nn.weight_cache import remove_made_from  # loads numpy, which only models need

    return remove_made_from(folder, sources)


def executor_spec(config: Config, device: str) -> ExecutorSpec:
    """Return the maximum sizes that the executor must support."""
    batch_tokens, sequences = DEVICE_DEFAULTS[device]
    cache, scheduling = config.cache, config.scheduling
    return ExecutorSpec(
        max_sequences=scheduling.max_sequences or sequences,
        max_batch_tokens=scheduling.max_batch_tokens or batch_tokens,
        block_size=cache.block_size,
        max_model_len=config.model.max_model_len,
        num_blocks=cache.num_blocks,
        pool_bytes=cache.kv_cache_bytes,
        pool_tokens=cache.kv_cache_tokens,
        memory_fraction=cache.memory_fraction,
        kv_dtype=cache.kv_cache_dtype,
        host_bytes=cache.host_cache_bytes,
    )


def limits(config: Config, capacity: Capacity, device: str) -> Limits:
    """Return the scheduler's limits for an opened executor."""
    speculation = config.speculation
    has_drafts = speculation.draft_model is not None or looks_up(config, capacity)
    sizes = Limits(
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        max_batch_tokens=config.scheduling.max_batch_tokens or DEVICE_DEFAULTS[device][0],
        max_sequences=capacity.num_slots,
        groups=capacity.groups,
        host_blocks=capacity.host_blocks,
        encoder_budget=capacity.encoder_budget,
        encoder_cache=capacity.encoder_cache,
        whole_span_tokens=capacity.whole_span_tokens,
        adapter_slots=config.adapters.max_loras if config.adapters.is_enabled else 0,
        max_draft_tokens=speculation.speculate_max_tokens if has_drafts else 0,
        max_draft_rows=speculation.speculate_max_rows,
        has_draft_model=speculation.draft_model is not None,
        has_paced_lookup=is_paced(config, capacity),
        num_stages=config.parallel.pipeline_parallel_size,
        tenant_weights=read_tenant_weights(config.serving.tenant_weight),
    )
    found = configured_limits(config.scheduling, config.cache, find_policy(config.scheduling.policy), sizes)
    if not capacity.is_encoder:
        return found
    max_batch_tokens, longest = max(sizes.max_batch_tokens, capacity.max_model_len), capacity.max_model_len
    if (given := config.scheduling.max_batch_tokens) is not None and given < longest:
        raise ConfigError(
            f"max_num_batched_tokens is {given}, but an encoder computes each text in one step, and texts have up to "
            f"{longest} tokens; give {longest} or more, or --max-model-len {given}"
        )
    return replace(found, chunked_prefill=False, prefix_caching=False, max_batch_tokens=max_batch_tokens)


class LLM(OfflineEngine):
    """Generates in batches: LLM("smollm2", max_model_len=2048).generate(["Hello"]).

    `settings` are octavo.config's: field names, or flags with underscores, most of which are vLLM's. The constructor
    loads the model. Raises ConfigError, UnknownModelError, ModelFileError, CapacityError.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        super().__init__(*_build_library(model, settings))


class AsyncLLM(AsyncEngine):
    """Generates like LLM, on an event loop: `async for output in AsyncLLM("smollm2").generate("Hello")`.

    The constructor loads the model, which blocks the event loop.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        super().__init__(*_build_library(model, settings))


def _build_library(model: str, settings: dict[str, Any]) -> tuple[Sessions, AdapterRegistry | None]:
    """Open an engine from keyword arguments; `lora_modules` may map names to paths."""
    modules = settings.get("lora_modules")
    if isinstance(modules, Mapping):
        settings = {**settings, "lora_modules": [f"{name}={path}" for name, path in modules.items()]}
    config = config_from_keywords(model, settings)
    local = build_local(config)
    return local.sessions, AdapterRegistry(local.client, config.adapters) if config.adapters.is_enabled else None


def engine_main() -> int:
    """Run the engine process (see engine.process)."""
    return run_engine_process(partial(open_engine, is_own_process=True))


def rank_main(arguments: Sequence[str]) -> int:
    """Run a rank process: of this host's engine, on two inherited connections; without them, of another host's engine.

    The settings of the latter are a line on stdin.
    """
    faulthandler.enable()
    set_up_log("text", "warning", "rank")
    if arguments:
        end_with_parent()
        plans, pings = (Channel(socket.socket(fileno=int(word))) for word in arguments)
        return RankServer(plans, pings, make_rank).run()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    end_with_parent()
    files = find_files(config)
    if files.kind != "scripted":
        _ranks_module()  # loads torch before host 0 needs it
    plans, pings = rank_hosts(config, files).dial()
    return RankServer(plans, pings, partial(_make_remote_rank, config)).run()


def _make_remote_rank(config: Config, begin: Begin) -> OwnRank:
    """Return a rank with this host's model files and threads, and host 0's other settings."""
    execution = replace(begin.config.execution, threads=config.execution.threads)
    merged = replace(begin.config, model=config.model, execution=execution)
    return make_rank(msgspec.structs.replace(begin, config=merged))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        os._exit(
            rank_main(sys.argv[2:])
        )  # at once: torch.distributed waits at an ordinary exit for ranks that are lost
    sys.exit(engine_main())
