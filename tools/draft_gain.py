"""Measure what a draft model gains: tokens per second with and without it on three texts, interleaved.

    python tools/draft_gain.py --dtype bfloat16 --rounds 3          # the default model drafts for itself in 4 bits
    python tools/draft_gain.py --random --rounds 8                   # a draft model with random weights: all rejected
    python tools/draft_gain.py --temperature 0.8 --sampling rejection

Each round runs every text without and with drafts, in turns, which one is first alternates. Prints a line for each
text, a line for all with the 95 % interval of the mean ratio, and one JSON object. Exact drafts must change no id.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.artifacts.resolve import resolve_model
from octavo.assembly import LLM
from octavo.core.request import SamplingParams
from octavo.text.tokenizer import Tokenizer

TEXTS = {
    "prose": "The history of the steam engine begins with",
    "code": 'def merge_sort(items):\n    """Return the items in ascending order."""\n',
    "list": "The planets of the solar system, with their distances from the sun:\n1. Mercury",
}
COUNTED = ("num_drafted_tokens", "num_accepted_tokens")


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


def measure(llm: LLM, text: str, params: SamplingParams, clock: Callable[[], float]) -> tuple[float, tuple[int, ...]]:
    """Return tokens per second by `clock`, and the ids."""
    started_at = clock()
    ids = tuple(llm.generate([text], params)[0].outputs[0].token_ids)
    return len(ids) / (clock() - started_at), ids


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and the 95 % interval of it, by the bootstrap (Efron, 1979)."""
    logs, draw = [math.log(ratio) for ratio in ratios], random.Random(1)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(2000))
    return math.exp(statistics.fmean(logs)), math.exp(means[49]), math.exp(means[1950])


def compare(engines: tuple[LLM, LLM], text: str, chosen: argparse.Namespace, number: int) -> tuple[float, float]:
    """Return tokens per second without and with drafts, in round `number`."""
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    params = SamplingParams(temperature=chosen.temperature, max_tokens=chosen.tokens, ignore_eos=True, seed=number)
    order = (0, 1) if number % 2 else (1, 0)
    found = {index: measure(engines[index], text, params, clock) for index in order}
    if chosen.sampling == "exact" or not chosen.temperature:
        assert found[0][1] == found[1][1], f"{text!r}: other ids with drafts"
    return found[0][0], found[1][0]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", help="the target's weights")
    parser.add_argument("--speculate", default="smollm2", help="as octavo serve's flag")
    parser.add_argument("--sampling", default="exact", choices=("exact", "rejection"), help="as --speculate-sampling")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--random", action="store_true", help="draft with random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time: on a machine that is not quiet")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = str(random_model(Path(folder))) if chosen.random else chosen.speculate
        common: Mapping[str, Any] = {"dtype": chosen.dtype, "quantization": "none", "max_model_len": 2048}
        drafted = LLM("smollm2", speculate=source, speculate_sampling=chosen.sampling, **common)
        engines = LLM("smollm2", **common), drafted
    for engine in engines:  # first pages and kernels
        engine.generate(["Warm up"], SamplingParams(max_tokens=16, ignore_eos=True))
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in TEXTS}
    made = {name: Counter[str]() for name in TEXTS}
    for number in range(chosen.rounds):
        for name, text in TEXTS.items():
            before = drafted.statistics()["scheduler"]
            speeds[name].append(compare(engines, text, chosen, number))
            after = drafted.statistics()["scheduler"]
            made[name] += Counter({key: after[key] - before[key] for key in COUNTED})
    report: dict[str, Any] = {"settings": vars(chosen), "pace": drafted.statistics()["draft_model"]}
    for engine in engines:
        engine.close()
    ratios = {name: [fast / slow for slow, fast in pairs] for name, pairs in speeds.items()}
    for name, pairs in speeds.items():
        drafts, share = made[name][COUNTED[0]], made[name][COUNTED[1]] / max(1, made[name][COUNTED[0]])
        report[name] = {"plain": [round(a, 1) for a, _ in pairs], "drafted": [round(b, 1) for _, b in pairs]}
        report[name] |= {"ratio": round(statistics.median(ratios[name]), 3), "accepted": round(share, 3), **made[name]}
        print(f"{name}: {report[name]['ratio']:.3f} times plain (median), {share:.1%} of {drafts} drafts accepted")
    mean, low, high = interval([ratio for each in ratios.values() for ratio in each])
    report["all"] = {"ratio": round(mean, 3), "low": round(low, 3), "high": round(high, 3)}
    print(f"all: {mean:.3f} times plain, 95 % interval {low:.3f} to {high:.3f}, {chosen.rounds} rounds")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
