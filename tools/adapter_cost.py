"""Measure what adapters cost: `python -m tools.adapter_cost [--rank 8] [--modules q_proj,v_proj] [--rounds 5]`.

Times steps of 32 rows of a model, over 8 random adapters and over none, in turns. Prints a line for each setting, and
the figures as JSON on the last line. The ratio is that of the fastest steps; with --threads 1, of the processor time
that they took, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo.artifacts.adapter import adapter_id, find_adapter
from octavo.artifacts.families import linear_shape, linear_tensors
from octavo.artifacts.family import LINEARS
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.assembly import create_executor, executor_spec, find_files, limits
from octavo.config.sources import config_from_keywords
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.adapters import AdaptedExecutor
from octavo.executors.protocol import Executor

NUM_ROWS, NUM_ADAPTERS, NUM_TOKENS = 32, 8, 48


def write_adapter(folder: Path, spec: ModelSpec, rank: int, modules: tuple[str, ...], seed: int) -> Path:
    """Write a random adapter of these modules (none: all linear layers)."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(spec.num_layers):
        for linear in LINEARS:
            inputs = linear_shape(spec, linear)[1]
            for name, outputs in linear_tensors(spec, linear, layer).items():
                if modules and name.rsplit(".", 1)[1] not in modules:
                    continue
                for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    values = rng.standard_normal(shape, np.float32) * np.float32(0.01)
                    tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def measure(model: str, rank: int, modules: tuple[str, ...], args: argparse.Namespace) -> dict[str, object]:
    """Return the milliseconds of a step without adapters and with them: the fastest of each."""
    config = config_from_keywords(model, {"enable_lora": True, "max_model_len": 256, "threads": args.threads})
    files = find_files(config)
    spec = read_model_spec(files)
    executor, device = create_executor(config, files, spec)
    sizes = limits(config, executor.open(executor_spec(config, device)), device)
    assert isinstance(executor, AdaptedExecutor), "the executor of a decoder"
    ids = []
    with tempfile.TemporaryDirectory() as temporary:
        for index in range(NUM_ADAPTERS):
            folder = str(write_adapter(Path(temporary) / str(index), spec, rank, modules, index))
            ids.append(adapter_id(find_adapter(folder)))
            executor.load_adapter(ids[-1], folder, rank)
    steps: dict[bool, list[float]] = {False: [], True: []}
    clock = time.process_time if args.threads == 1 else time.perf_counter
    for _ in range(args.rounds):
        for has_adapters, times in steps.items():
            times += step_times(executor, Scheduler(sizes), ids if has_adapters else [0], clock)
    executor.close()
    none_ms, adapters_ms = (1000 * min(steps[which]) for which in (False, True))
    return {
        "model": model,
        "rank": rank,
        "modules": ",".join(modules) or "all",
        "none_ms": round(none_ms, 2),
        "adapters_ms": round(adapters_ms, 2),
        "ratio": round(adapters_ms / none_ms, 3),
    }


def step_times(executor: Executor, scheduler: Scheduler, ids: Sequence[int], clock: Callable[[], float]) -> list[float]:
    """Return the seconds of steps of NUM_ROWS rows, which have these adapters in turn."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    for row in range(NUM_ROWS):
        request = Request(f"r{row}", array("i", [10 + row, 20, 30]), params, adapter_id=ids[row % len(ids)])
        scheduler.admit(request, 0.0)
    times = []
    while not (plan := scheduler.plan(0.0)).is_empty:
        began = clock()
        result = executor.collect(executor.submit(plan))
        if plan.num_query_tokens == NUM_ROWS:
            times.append(clock() - began)
        scheduler.commit(plan, result, 0.0)
    return times


def main() -> None:
    """Measure one setting, or the common ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--modules", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    settings = [(8, ("q_proj", "v_proj")), (8, ()), (16, ("q_proj", "v_proj")), (16, ())]
    if args.rank is not None:
        settings = [(args.rank, tuple(filter(None, args.modules.split(","))))]
    found = []
    for rank, modules in settings:
        found.append(measure(args.model, rank, modules, args))
        print(" ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
