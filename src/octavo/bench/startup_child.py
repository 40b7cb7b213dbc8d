"""A new process that opens an engine, generates one token, and reports the times of the parts.

Does not: repeat or compare (startup does). Run as `python -m octavo.bench.startup_child START PROMPT_LENGTH` with a
Config as a line of JSON on stdin; START is the parent's time.monotonic().
As in every Octavo process, the tokenizer and torch load concurrently, so the parts overlap and do not add up.
"""

from __future__ import annotations

import time

_ENTERED = time.monotonic()

import asyncio  # noqa: E402  (the mark comes first)
import importlib.util  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from importlib.machinery import ModuleSpec  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any  # noqa: E402

# The functions that load weights and allocate the pool: (module, class or "", function). A missing one is not timed.
_EXECUTOR_PARTS = {
    "weights": ("octavo.executors.loading", "DecoderChoice", "load"),
    "pool": ("octavo.executors.torch_executor", "TorchExecutor", "allocate"),
}
_TEXT_PARTS = {"tokenizer": ("octavo.text.text_model", "TextModel", "load")}


class TorchClock:
    """An import finder that times the first import of torch and changes nothing else."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._is_busy = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return torch's ordinary spec with a timed loader; None for other modules."""
        if name != "torch" or self._is_busy:
            return None
        self._is_busy = True
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = timed(loader.exec_module, "torch", self._seconds)
        return spec


def timed(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return a wrapper that adds each call's duration to seconds[part]."""

    def run(*args: Any, **options: Any) -> Any:
        start = time.monotonic()
        try:
            return function(*args, **options)
        finally:
            seconds[part] = seconds.get(part, 0.0) + time.monotonic() - start

    return run


def time_parts(parts: Mapping[str, tuple[str, str, str]], seconds: dict[str, float]) -> None:
    """Replace the functions of these parts by timed ones; skip missing functions. Imports the functions' modules."""
    for part, (module_name, class_name, name) in parts.items():
        if importlib.util.find_spec(module_name) is None:
            continue
        owner = getattr(importlib.import_module(module_name), class_name, None)
        function = None if owner is None else owner.__dict__.get(name)
        if isinstance(function, classmethod):
            setattr(owner, name, classmethod(timed(function.__func__, part, seconds)))
        elif function is not None:
            setattr(owner, name, timed(function, part, seconds))


def main() -> int:
    """Open the engine, run one request of one token, print one line of JSON."""
    start, num_prompt = float(sys.argv[1]), int(sys.argv[2])
    seconds: dict[str, float] = {}
    sys.meta_path.insert(0, TorchClock(seconds))

    import msgspec

    from octavo import assembly
    from octavo.bench.offline import OfflineBench, StepRecorder
    from octavo.bench.report import engine_facts, peak_memory_bytes
    from octavo.bench.workload import draw_workload
    from octavo.config import Config
    from octavo.executors import limit_spinning

    create = assembly.create_executor

    def create_timed(*args: Any) -> Any:
        """Import torch and call create_executor. Runs in its own thread while another thread loads the tokenizer."""
        limit_spinning()
        time_parts(_EXECUTOR_PARTS, seconds)
        return create(*args)

    imported = time.monotonic()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    time_parts(_TEXT_PARTS, seconds)
    assembly.create_executor = create_timed  # type: ignore[assignment]
    engine = assembly.build_local(config)
    opened = time.monotonic()

    async def first_token(engine: assembly.LocalEngine) -> None:
        workload = draw_workload(1, num_prompt, 1, engine.capacity.vocab_size, 0)
        try:
            await OfflineBench(engine.client, StepRecorder(engine.loop), 1).run(workload)
        finally:
            done.append(time.monotonic())
            await engine.client.close()

    done: list[float] = []
    asyncio.run(first_token(engine))
    parts = {"interpreter": _ENTERED - start, "imports": imported - _ENTERED, **seconds}
    parts |= {"open": opened - imported, "first_step": done[0] - opened, "first_token": done[0] - start}
    facts = engine_facts(engine.text.name, config, engine.capacity)
    print(json.dumps({"parts": parts, "facts": facts, "peak_memory_bytes": peak_memory_bytes()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
