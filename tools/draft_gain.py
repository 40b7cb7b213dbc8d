"""Measure what drafts gain: tokens per second with and without them on the same requests, interleaved.

    python tools/draft_gain.py                                       # prompt lookup, as it is by default
    python tools/draft_gain.py --workload tools/workloads/b.json.gz
    python tools/draft_gain.py --workload tools/workloads/a.json.gz --at-once 32
    python tools/draft_gain.py --speculate smollm2 --dtype bfloat16 --quantization none   # drafts for itself in 4 bits
    python tools/draft_gain.py --speculate random --dtype bfloat16 --quantization none    # random weights: all rejected

Each round runs every text, or every group of --at-once requests of a workload, without and with drafts, in turns; which
one is first alternates. The engines are processes of their own, since two teams of threads in one process disturb each
other. Nothing is found in a prefix cache. Prints a line for each text, a line for all with the 95 % interval of the
mean ratio, and one JSON object. Exact drafts must change no id.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from octavo.artifacts.resolve import resolve_model
from octavo.assembly import LLM
from octavo.bench.workload import read_workload
from octavo.core.request import SamplingParams
from octavo.text.text_model import TextModel
from octavo.text.tokenizer import Tokenizer

TEXTS = {
    "prose": "The history of the steam engine begins with",
    "code": 'def merge_sort(items):\n    """Return the items in ascending order."""\n',
    "list": "The planets of the solar system, with their distances from the sun:\n1. Mercury",
}
QUESTIONS = (
    "Tell me a story about a fox who learns to fly.", "What causes the seasons?", "How does a bicycle stay upright?",
    "Write a short letter to my landlord about a broken heater.", "Who was Marie Curie and why is she famous?",
    "Write a poem about autumn rain.",
)  # fmt: skip
COUNTED = ("num_drafted_tokens", "num_accepted_tokens")
WARM_UP = 300  # tokens: a new process is slower at first


def random_model(folder: Path) -> Path:
    """Write a model with the default model's tokenizer, eight layers and random weights."""
    Tokenizer.from_files(resolve_model(None)).backend.save(str(folder / "tokenizer.json"))
    hidden, inner, kv, vocab, num_layers = 576, 1536, 192, 49152, 8
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": num_layers, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden) / 30}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(num_layers):
        name = f"model.layers.{layer}."
        tensors |= {f"{name}self_attn.{one}.weight": torch.randn(shape) / 25 for one, shape in shapes.items()}
        tensors |= {f"{name}mlp.{one}.weight": torch.randn(inner, hidden) / 25 for one in ("gate_proj", "up_proj")}
        tensors[f"{name}mlp.down_proj.weight"] = torch.randn(hidden, inner) / 40
        tensors |= {f"{name}{one}_layernorm.weight": torch.ones(hidden) for one in ("input", "post_attention")}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class Requests(NamedTuple):
    """Requests that run at once: their prompts, and the tokens that each gets."""

    prompts: list[list[int]]
    max_tokens: list[int]


class Run(NamedTuple):
    """One run of requests: its seconds, the ids, and the drafts made and accepted."""

    seconds: float
    ids: list[tuple[int, ...]]
    num_drafts: int
    num_accepted: int


def serve(pipe: Connection, settings: dict[str, Any], uses_cpu_time: bool) -> None:
    """Run an engine in this process: (requests, parameters) in, a Run out; None ends it and returns its pace."""
    clock = time.process_time if uses_cpu_time else time.perf_counter
    with LLM("smollm2", max_model_len=2048, enable_prefix_caching=False, **settings) as llm:
        llm.generate(["Warm up"], SamplingParams(max_tokens=WARM_UP, ignore_eos=True, seed=0))
        while (job := pipe.recv()) is not None:
            requests, params = job
            before, started_at = llm.statistics()["scheduler"], clock()
            prompts = [{"prompt_token_ids": array("i", ids)} for ids in requests.prompts]
            found = llm.generate(prompts, [SamplingParams(max_tokens=most, **params) for most in requests.max_tokens])
            seconds, after = clock() - started_at, llm.statistics()["scheduler"]
            ids = [tuple(one.outputs[0].token_ids) for one in found]
            pipe.send(Run(seconds, ids, *(after[name] - before[name] for name in COUNTED)))
        learned = llm.statistics()
        pipe.send(learned.get("draft_model") or learned.get("lookups"))


class Engine:
    """An engine in a process of its own."""

    def __init__(self, settings: dict[str, Any], uses_cpu_time: bool) -> None:
        self.pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=serve, args=(theirs, settings, uses_cpu_time))
        self._process.start()

    def run(self, requests: Requests, params: dict[str, Any]) -> Run:
        """Run requests to their ends."""
        self.pipe.send((requests, params))
        found: Run = self.pipe.recv()
        return found

    def close(self) -> Any:
        """End the process; return what its pace learned."""
        self.pipe.send(None)
        pace = self.pipe.recv()
        self._process.join()
        return pace


def read_requests(chosen: argparse.Namespace) -> dict[str, Requests]:
    """Return the requests by name: the texts, or groups of the workload's."""
    if chosen.workload is None:
        text = TextModel.load(resolve_model(None))
        made = {name: text.tokenizer.encode(words) for name, words in TEXTS.items()}
        for index, question in enumerate(QUESTIONS):
            made[f"question {index}"] = text.prompt_ids_from_messages([{"role": "user", "content": question}])
        return {name: Requests([list(ids)], [chosen.tokens]) for name, ids in made.items()}
    items = read_workload(chosen.workload).items
    groups = [items[begin : begin + chosen.at_once] for begin in range(0, len(items), chosen.at_once)]
    return {
        f"requests {index}": Requests([list(one.prompt_token_ids) for one in group], [one.max_tokens for one in group])
        for index, group in enumerate(groups)
    }


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and the 95 % interval of it, by the bootstrap (Efron, 1979)."""
    logs, draw = [math.log(ratio) for ratio in ratios], random.Random(1)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(2000))
    return math.exp(statistics.fmean(logs)), math.exp(means[49]), math.exp(means[1950])


def compare(
    engines: tuple[Engine, Engine], requests: Requests, chosen: argparse.Namespace, number: int
) -> tuple[Run, Run]:
    """Run requests without and with drafts, in round `number`."""
    params = {"temperature": chosen.temperature, "ignore_eos": True, "seed": number}
    order = (0, 1) if number % 2 else (1, 0)
    found = {index: engines[index].run(requests, params) for index in order}
    if chosen.sampling == "exact" or not chosen.temperature:
        assert found[0].ids == found[1].ids, "other ids with drafts"
    return found[0], found[1]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", help="the target's weights")
    parser.add_argument("--quantization", default="auto", help="the target's weights")
    parser.add_argument("--speculate", default="auto", help="as octavo serve's flag; random: a model of random weights")
    parser.add_argument("--sampling", default="exact", choices=("exact", "rejection"), help="as --speculate-sampling")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--workload", type=Path, help="a workload file, instead of the texts")
    parser.add_argument("--at-once", type=int, default=1, help="requests of the workload that run at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each text's answer")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time: on a machine that is not quiet")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = str(random_model(Path(folder))) if chosen.speculate == "random" else chosen.speculate
        common = {"dtype": chosen.dtype, "quantization": chosen.quantization}
        drafting = {**common, "speculate": source, "speculate_sampling": chosen.sampling}
        engines = Engine({**common, "speculate": "none"}, chosen.cpu_time), Engine(drafting, chosen.cpu_time)
        asked = read_requests(chosen)
        runs: dict[str, list[tuple[Run, Run]]] = {name: [] for name in asked}
        for number in range(chosen.rounds):
            for name, requests in asked.items():
                runs[name].append(compare(engines, requests, chosen, number))
        _, pace = [engine.close() for engine in engines]
    report: dict[str, Any] = {"settings": {**vars(chosen), "workload": str(chosen.workload)}, "pace": pace}
    ratios = {name: [plain.seconds / drafted.seconds for plain, drafted in pairs] for name, pairs in runs.items()}
    for name, pairs in runs.items():
        num_drafts, num_accepted = (sum(each) for each in zip(*(drafted[2:] for _, drafted in pairs), strict=True))
        plain, drafted = (
            [round(sum(map(len, run.ids)) / run.seconds, 1) for run in each] for each in zip(*pairs, strict=True)
        )
        ratio, share = statistics.median(ratios[name]), num_accepted / max(1, num_drafts)
        report[name] = {"plain": plain, "drafted": drafted, "ratio": round(ratio, 3), "accepted": round(share, 3)}
        print(f"{name}: {ratio:.3f} times plain (median), {share:.1%} of {num_drafts} drafts accepted")
    mean, low, high = interval([ratio for each in ratios.values() for ratio in each])
    report["all"] = {"ratio": round(mean, 3), "low": round(low, 3), "high": round(high, 3)}
    print(f"all: {mean:.3f} times plain, 95 % interval {low:.3f} to {high:.3f}, {chosen.rounds} rounds")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
