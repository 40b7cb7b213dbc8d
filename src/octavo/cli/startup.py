"""What `octavo serve` prints when it starts: the model, memory, processes, and how to call it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.artifacts.resolve import ModelFiles
from octavo.config import Config
from octavo.executors.protocol import Capacity

if TYPE_CHECKING:
    from octavo.cli.api_process import ApiTask, Engine

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def startup_report(config: Config, files: ModelFiles, capacity: Capacity, startup_s: float) -> Iterator[str]:
    """Yield lines about the model, the machine, memory and the features that are off."""
    revision = f" at {files.revision[:12]}" if files.revision else ""
    threads = f", {capacity.num_threads} threads" if capacity.device == "cpu" else ""
    types = capacity.dtype if capacity.quantization == "none" else f"{capacity.quantization} weights, {capacity.dtype}"
    tokens = capacity.num_blocks[0] * capacity.block_size
    pool_bytes = _bytes_of(capacity, capacity.num_blocks)
    yield f"model     {files.name}{revision}, {types}, {capacity.device}{threads}"
    if files.kind == "scripted":
        yield f"weights   none: answers are those of {files.weights[0]}"
    else:
        source = files.weights[0] if files.kind == "gguf" else files.root
        yield f"weights   {capacity.weight_bytes / 2**20:,.0f} MiB from {source}"
    yield (
        f"KV pool   {tokens:,} tokens, {pool_bytes / 2**20:,.0f} MiB: "
        f"{tokens / capacity.max_model_len:.1f} requests of full length ({capacity.max_model_len:,}), "
        f"{capacity.num_slots} running at most"
    )
    if capacity.host_blocks:
        host_tokens = capacity.host_blocks[0] * capacity.block_size
        host_bytes = _bytes_of(capacity, capacity.host_blocks)
        yield f"host KV   {host_tokens:,} tokens, {host_bytes / 2**20:,.0f} MiB"
    if config.recording.record is not None:
        kept = "token ids too" if config.recording.record_text else "lengths and digests, no token ids"
        yield f"recording {config.recording.record}, at most {config.recording.record_bytes:,} bytes: {kept}"
    for off in _features_off(config):
        yield f"off       {off}"
    yield f"started   in {startup_s:.1f} s"


def _bytes_of(capacity: Capacity, num_blocks: tuple[int, ...]) -> int:
    return sum(count * group.block_bytes for count, group in zip(num_blocks, capacity.groups, strict=True))


def _features_off(config: Config) -> Iterator[str]:
    if not config.cache.enable_prefix_caching:
        yield "prefix caching (--no-enable-prefix-caching)"
    if not config.scheduling.chunked_prefill:
        yield "chunked prefill (--no-enable-chunked-prefill)"
    if config.serving.in_process:
        yield "crash protection (--in-process)"
    if not config.serving.has_keys:
        reason = (
            "only this machine can connect" if config.serving.host in _LOOPBACK else "ANYONE who can connect can use it"
        )
        yield f"authentication (no --api-key): {reason}"


def process_report(task: ApiTask, engine: Engine) -> Iterator[str]:
    """Yield lines about the processes, and what a crash would do."""
    if task.config.serving.in_process:
        yield f"process   {os.getpid()}, engine included; no crash protection (--in-process): a crash ends the server"
    else:
        others = "".join(f", {role} {pid}" for role, pid in engine.processes.items())
        yield f"processes supervisor {task.supervisor_pid}, api {os.getpid()}{others}"
        standby = "a standby takes over" if task.config.serving.standby else "no standby (--standby)"
        yield f"crashes   an engine that dies or hangs is replaced and open requests go on; {standby}"
    yield f"admin     octavo admin status --server {task.supervisor_pid or os.getpid()}  (socket {task.admin_socket})"


def call_report(config: Config, model: str, url: str) -> Iterator[str]:
    """Yield the URL and a command to paste."""
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if config.serving.has_keys else ""
    yield f"serving   {url}/v1  (also /docs, /metrics)"
    yield f"open      {url}/  (a chat; the engine at work is at /dashboard)"
    yield (
        f"try       curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f'-d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )


def journal_report(num_resumed: int, num_answers: int) -> list[str]:
    """Return a line about what a server resumed from the journal, if anything."""
    if not num_resumed + num_answers:
        return []
    return [f"journal: {num_resumed} requests go on, {num_answers} answers are kept for a retry"]
