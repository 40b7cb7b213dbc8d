"""Everything that only a CUDA device can show, in ten minutes at most: run it, and paste the table and the JSON object.

    python -m tools.gpu_check [MODEL] [--minutes 10] [--batches 1 8 64 256] [--context 1024] [--vllm-python PYTHON]

Parts: the device's facts; the self-check (kernels against references, bits); the executor's conformance tests on the
device; bandwidth and matrix products; then MODEL: ids of captured steps against eager ones, ids alone against ids in a
batch (--numerics invariant), first tokens against the CPU's if the model is small, tokens/s at each batch size beside
the floor that bandwidth sets, and vLLM's beside it if PYTHON (this one if not given) has it. A model of any size with
random weights: `python -m tools.model_folder`. Each part is a process of its own, and this one never asks for the
device: a part that fails, crashes or hangs is reported with its trace, its memory is free again, and the others run.
Each result is printed to stderr at once. Exit status: 0 all right, 1 a part failed, 2 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools.vllm_speed import make_prompts

from octavo import SamplingParams
from octavo.artifacts.resolve import resolve_model
from octavo.assembly import build_local
from octavo.config.sources import config_from_keywords
from octavo.executors.device import reason_of
from octavo.executors.device_choice import look_for_cuda
from octavo.executors.protocol import Capacity
from octavo.executors.self_check import check_device
from octavo.frontend.offline import OfflineEngine
from octavo.nn.layers import Linear
from octavo.ops.triton import available
from octavo.simulator.costs.hardware import DEVICES, DeviceFacts

ROOT = Path(__file__).resolve().parent.parent
NO_DEVICE = 2
SMALL_BYTES = 1 << 30  # of weights: such a model is compared with the CPU
OUTPUTS = 64  # tokens of each answer
TRACE = 4000  # characters of a failed part's output that the JSON object has
Facts = dict[str, Any]
CHILD = (sys.executable, "-m", "tools.gpu_check", "--part")  # what runs a part; its description follows
LIMITS_S = {
    "device": 60, "self-check": 150, "conformance": 240, "speed": 90, "answers": 150, "cpu": 150, "serving": 240,
    "vllm": 240,
}  # fmt: skip
LEAST_S = 5  # no part begins with less time left


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: bytes copied, a product's inputs and outputs, batch sizes, tokens of a prompt and an answer."""

    copied: int = 1 << 30
    product: tuple[int, int] = (4096, 14336)
    batches: Sequence[int] = (1, 8, 64, 256)
    context: int = 1024
    outputs: int = OUTPUTS


@dataclass(slots=True)
class Check:
    """The parts' results by name. A part ends at its limit, and all of them at `ends_at`."""

    ends_at: float
    results: dict[str, Facts] = field(default_factory=dict)

    def part(self, name: str, run: Callable[[float], Facts]) -> Facts:
        """Run a part, which gets the number of seconds that it has; a result with `ok` false is a failure."""
        started_at = time.monotonic()
        if (left_s := self.ends_at - started_at) < LEAST_S:
            self.results[name] = {"ok": None, "why": "no time was left"}
            return self.results[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = attempt(lambda: run(min(left_s, LIMITS_S[name])))
        self.results[name] = {**found, "seconds": round(time.monotonic() - started_at, 1)}
        print(json.dumps({name: self.results[name]}), file=sys.stderr, flush=True)
        return self.results[name]


def attempt(run: Callable[[], Facts]) -> Facts:
    """Return a part's result; an error is a failure of the part."""
    try:
        return {"ok": True, **run()}
    except Exception as error:  # the shell: whatever a device raises is the part's result
        return {"ok": False, "why": reason_of(error)[:300], "trace": traceback.format_exc()[-TRACE:]}


def run_child(name: str, words: Sequence[str], limit_s: float) -> Facts:
    """Return the JSON object that a process prints as its last line, or how the process failed."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as child:
        try:
            out, errors = child.communicate(timeout=limit_s)
            how = f"ended with status {child.returncode}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            _kill(child)
            out, errors = child.communicate()
            how = f"took more than {limit_s:.3g} s"
        except BaseException:
            _kill(child)
            raise
    if how:
        _kill(child)  # what it started
    elif result := next((line for line in reversed(out.splitlines()) if line.startswith("{")), ""):
        with suppress(ValueError):
            found: Facts = json.loads(result)
            return found
    how = how or "printed no result"
    lines = [line.strip() for line in (errors.strip() or out.strip()).splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "no output"
    return {"ok": False, "why": f"{name} {how}: {last}", "trace": (errors or out)[-TRACE:]}


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def describe_device(device: torch.device) -> Facts:
    """Return the facts that every other figure depends on, and the share of the memory that a process can have."""
    facts: Facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": _version("triton")}
    if device.type == "cuda":
        if (obstacle := look_for_cuda().obstacle) is not None:
            return {"ok": None, "why": obstacle}
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        facts |= {"memory_gib": round(properties.total_memory / 2**30, 1), "sms": properties.multi_processor_count}
        free, total = torch.cuda.mem_get_info(device)
        facts["free_share"] = round(min(0.9, free / total - 0.02), 3)
    return facts


def check_kernels(device: torch.device) -> Facts:
    """Run the engine's self-check."""
    report = check_device(device)
    facts: Facts = {"ok": not report.faults, "kernels": report.num_trials, "faults": report.faults}
    return facts | {"numerics": "fast" if report.differing else "invariant", "differing": report.differing}


def check_conformance(device: torch.device) -> Facts:
    """Run the tests of an executor on this device."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/executors/test_torch_executor.py"]
    words += ["-k", "TestCUDA" if device.type == "cuda" else "TestReferenceAttention and K05"]
    missing = [name for name in ("pytest", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return {"ok": None, "why": f"{' and '.join(missing)} not installed (pip install -e '.[test]')"}
    compiled = {**os.environ, "TRITON_INTERPRET": "0"}  # without it, tests interpret kernels
    done = subprocess.run(words, cwd=ROOT, env=compiled, capture_output=True, text=True)
    found: Facts = {"ok": done.returncode == 0, "tests": (done.stdout.splitlines() or ["none ran"])[-1]}
    return found if found["ok"] else found | {"trace": (done.stdout + done.stderr)[-TRACE:]}


def sheet_of(name: str) -> DeviceFacts | None:
    """Return the facts by which `octavo plan` and the simulator know a device of this name, if they do."""
    plain = re.sub(r"\b(rtx|pro) ", r"\1", name.lower())
    fitting = [
        facts
        for facts in DEVICES.values()
        if all(re.search(rf"\b{part}(?!\d)", plain) for part in facts.name.split("-"))
    ]
    return max(fitting, key=lambda facts: len(facts.name), default=None)


def compare_with_sheet(speed: Facts, facts: Facts) -> None:
    """Add to the measured speed what share of the data sheet's it is."""
    sheet = sheet_of(facts.get("name", ""))
    if sheet is not None and "copy_gb_s" in speed:
        fastest = max(value for key, value in speed.items() if key.endswith("_tflops"))
        speed["sheet"] = sheet.name
        speed["copy_of_sheet"] = round(speed["copy_gb_s"] * 1e9 / sheet.bandwidth, 3)
        speed["tflops_of_sheet"] = round(fastest * 1e12 / sheet.flops16, 3)


def measure_device(device: torch.device, sizes: Sizes) -> Facts:
    """Measure a copy, and linear layers of several numbers of rows: by cuBLAS, and by the invariant kernel."""
    source = torch.ones(sizes.copied // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(device, lambda: target.copy_(source))
    facts: Facts = {"copy_gb_s": round(2 * source.nbytes / seconds / 1e9, 1)}
    inputs, outputs = sizes.product
    weight_FE = torch.randn(outputs, inputs, device=device).to(torch.bfloat16)
    paths = ("plain", "invariant") if available.uses_kernels(weight_FE) else ("plain",)
    for rows in (1, 16, 64, 256, 4096):
        x_TE = torch.randn(rows, inputs, device=device).to(torch.bfloat16)
        for path in paths:
            linear = Linear(weight_FE, path=path)
            seconds = _seconds(device, lambda linear=linear, x_TE=x_TE: linear(x_TE))
            facts[f"{path}_{rows}_tflops"] = round(2 * rows * inputs * outputs / seconds / 1e12, 2)
    return facts


@contextmanager
def open_model(model: str, **settings: Any) -> Iterator[tuple[OfflineEngine, Capacity]]:
    """Yield an engine of this process, and what it holds."""
    built = build_local(config_from_keywords(model, settings))
    with OfflineEngine(built.sessions) as engine:
        yield engine, built.capacity


def check_answers(model: str, device: torch.device, sizes: Sizes) -> Facts:
    """Compare ids of captured and eager steps, and ids alone and in a batch."""
    prompts = make_prompts(9, min(sizes.context, 200))
    greedy = SamplingParams(temperature=0.0, max_tokens=sizes.outputs, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=sizes.outputs, ignore_eos=True, logprobs=1)
    with open_model(model, device=device.type, numerics="invariant", max_num_seqs=16) as (llm, _):
        captured = _ids(llm, prompts, greedy)
        eager = _ids(llm, prompts, scored)
        alone = [_ids(llm, [prompt], greedy)[0] for prompt in prompts[:3]]
    equal = {"captured_equals_eager": captured == eager, "alone_equals_batch": alone == captured[:3]}
    return {"ok": all(equal.values()), **equal}


def compare_with_cpu(model: str, device: torch.device) -> Facts:
    """Compare the logarithms of the first tokens' probabilities with the CPU's in float32."""
    if sum(path.stat().st_size for path in resolve_model(model).weights) > SMALL_BYTES:
        return {"ok": None, "why": "the model is large for the CPU"}
    prompts = make_prompts(4, 64)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = []
    for settings in ({"device": device.type, "dtype": "float32"}, {"device": "cpu", "dtype": "float32"}):
        with open_model(model, quantization="none", max_num_seqs=4, **settings) as (llm, _):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            firsts = [one.outputs[0].logprobs[0] for one in outputs]
            found.append([dict(zip(first.top_ids, first.top_logprobs, strict=True)) for first in firsts])
    ours, cpus = found
    pairs = [(a[token], b[token]) for a, b in zip(ours, cpus, strict=True) for token in a.keys() & b.keys()]
    largest = max(abs(a - b) for a, b in pairs)
    return {"ok": largest < 0.02, "largest_difference": round(largest, 5), "compared": len(pairs)}


def measure_serving(model: str, device: torch.device, sizes: Sizes, copy_gb_s: float) -> Facts:
    """Measure output tokens/s at each batch size, beside the floor: weights and contexts read once in each step."""
    facts: Facts = {}
    with open_model(model, device=device.type, max_num_seqs=max(sizes.batches)) as (llm, capacity):
        for batch in sizes.batches:
            prompts = make_prompts(batch, sizes.context)

            def seconds(outputs: int, prompts: list[list[int]] = prompts) -> float:
                llm.reset_prefix_cache()
                params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
                return _timed(lambda: _ids(llm, prompts, params))

            seconds(2)  # kernels are compiled
            step_s = max(1e-9, seconds(sizes.outputs + 1) - seconds(1)) / sizes.outputs
            context = sizes.context + sizes.outputs // 2
            read = capacity.weight_bytes + batch * context * capacity.kv_bytes_per_token
            floor_s = read / (copy_gb_s * 1e9)
            facts[str(batch)] = {
                "tokens_s": round(batch / step_s, 1),
                "step_ms": round(1000 * step_s, 3),
                "floor_ms": round(1000 * floor_s, 3),
                "of_floor": round(floor_s / step_s, 3),
            }
            print(batch, facts[str(batch)], file=sys.stderr, flush=True)  # for the trace, if a later one fails
    return {"batches": facts, "notes": list(capacity.notes)}


def measure_vllm(model: str, sizes: Sizes, share: float, python: str, limit_s: float) -> Facts:
    """Measure vLLM in a process of its own with `share` of the device's memory; say so if it is not installed."""
    files = resolve_model(model)
    if files.kind != "hf":
        return {"ok": None, "why": f"{files.name} is no folder of safetensors, which vLLM would read"}
    asked = {"model": str(files.root), "batches": list(sizes.batches), "context": sizes.context}
    asked |= {"outputs": sizes.outputs, "share": share}
    found = run_child("vLLM", [python, str(ROOT / "tools" / "vllm_speed.py"), json.dumps(asked)], limit_s)
    return {"ok": None, "why": f"vllm is not installed ({found['missing']})"} if "missing" in found else found


def compare(serving: Facts, vllm: Facts) -> None:
    """Add to vLLM's figures of each batch size what share of them Octavo reached."""
    ours = serving.get("batches", {})
    for batch, row in vllm.get("batches", {}).items():
        if batch in ours:
            row["octavo_of_it"] = round(ours[batch]["tokens_s"] / row["tokens_s"], 3)


@dataclass(frozen=True, slots=True)
class Part:
    """What a part's process is to do; `copy_gb_s` is the speed that the part before it measured."""

    name: str
    model: str
    device: str
    sizes: Sizes
    copy_gb_s: float = 1.0

    @classmethod
    def read(cls, text: str) -> Part:
        """Return the part that a description describes."""
        asked = json.loads(text)
        return cls(**{**asked, "sizes": Sizes(**asked["sizes"])})

    def describe(self) -> str:
        """Return a description for `read`."""
        return json.dumps(asdict(self))

    def run(self) -> Facts:
        """Run the part in this process."""
        device = torch.device(self.device)
        parts: dict[str, Callable[[], Facts]] = {
            "device": lambda: describe_device(device),
            "self-check": lambda: check_kernels(device),
            "conformance": lambda: check_conformance(device),
            "speed": lambda: measure_device(device, self.sizes),
            "answers": lambda: check_answers(self.model, device, self.sizes),
            "cpu": lambda: compare_with_cpu(self.model, device),
            "serving": lambda: measure_serving(self.model, device, self.sizes, self.copy_gb_s),
        }
        return attempt(parts[self.name])

    def start(self, limit_s: float) -> Facts:
        """Run the part in a process of its own."""
        return run_child(self.name, [*CHILD, self.describe()], limit_s)


def run_checks(
    model: str, device: str, sizes: Sizes, minutes: float, vllm_python: str = sys.executable
) -> dict[str, Facts]:
    """Run all parts, one after the other; return their results by name. Without a device, only the first one runs."""
    check = Check(time.monotonic() + 60 * minutes)

    def part(name: str, copy_gb_s: float = 1.0) -> Facts:
        return check.part(name, Part(name, model, device, sizes, copy_gb_s).start)

    facts = part("device")
    if facts["ok"] is None:
        return check.results
    part("self-check")
    part("conformance")
    speed = part("speed")
    compare_with_sheet(speed, facts)
    part("answers")
    part("cpu")
    serving = part("serving", speed.get("copy_gb_s", 1.0))
    share = facts.get("free_share", 0.9)
    compare(serving, check.part("vllm", partial(measure_vllm, model, sizes, share, vllm_python)))
    return check.results


def table(results: dict[str, Facts]) -> list[str]:
    """Return the results as lines of a table."""
    states = {True: "ok", False: "FAILED", None: "not run"}
    lines = ["| part | result | figures |", "|---|---|---|"]
    for name, found in results.items():
        figures = {
            key: value for key, value in found.items() if key not in ("ok", "batches", "seconds", "notes", "trace")
        }
        text = ", ".join(f"{key} {value}" for key, value in figures.items())
        lines.append(f"| {name} | {states[found['ok']]} | {text} |")
        for batch, row in found.get("batches", {}).items():
            lines.append(f"| {name}, batch {batch} | | {', '.join(f'{key} {value}' for key, value in row.items())} |")
    return lines


def _version(package: str) -> str:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "not installed"


def _ids(llm: Any, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _timed(run: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    run()
    return time.perf_counter() - started_at


def _seconds(device: torch.device, run: Callable[[], object], rounds: int = 10) -> float:
    """Return the least seconds of one call, of `rounds` after three to warm up."""

    def once() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        once()
    return min(_timed(once) for _ in range(rounds))


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that there is time for; print the table and one JSON object."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2", help="what is served [smollm2]")
    parser.add_argument("--minutes", type=float, default=10.0, help="all parts end by then [10]")
    parser.add_argument("--batches", type=int, nargs="+", default=list(Sizes().batches), help="batch sizes")
    parser.add_argument("--context", type=int, default=Sizes().context, help="tokens of a prompt [1024]")
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python that has vLLM [this one]")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what this process, one of a check's, is to do
    args = parser.parse_args(arguments)
    if args.part is not None:
        print(json.dumps(Part.read(args.part).run(), default=str), flush=True)
        os._exit(0)  # a context that is lost may block an ordinary exit
    sizes = Sizes(batches=args.batches, context=args.context)
    results = run_checks(args.model, "cuda", sizes, args.minutes, args.vllm_python)
    if results["device"]["ok"] is None:
        print(f"nothing was checked: {results['device']['why']}; this tool needs a CUDA device", file=sys.stderr)
        return NO_DEVICE
    print("\n".join(table(results)))
    print(json.dumps(results))
    return int(any(found["ok"] is False for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
