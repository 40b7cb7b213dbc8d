"""Measure what a draft model gains: tokens per second with and without it on three texts, interleaved.

    python tools/draft_gain.py --dtype bfloat16 --rounds 3          # the default model drafts for itself in 4 bits
    python tools/draft_gain.py --random                              # a draft model with random weights: all rejected

Prints a line for each text, and one JSON object at the end. Ids with and without drafts must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
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


def measure(llm: LLM, text: str, num_tokens: int, clock: Callable[[], float]) -> tuple[float, tuple[int, ...]]:
    """Return tokens per second by `clock`, and the ids."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started_at = clock()
    answer = llm.generate([text], params)[0].outputs[0]
    return num_tokens / (clock() - started_at), tuple(answer.token_ids)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", help="the target's weights")
    parser.add_argument("--speculate", default="smollm2", help="as octavo serve's flag")
    parser.add_argument("--random", action="store_true", help="draft with random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time: on a machine that is not quiet")
    chosen = parser.parse_args()
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        source = str(random_model(Path(folder))) if chosen.random else chosen.speculate
        common: Mapping[str, Any] = {"dtype": chosen.dtype, "quantization": "none", "max_model_len": 2048}
        plain, drafted = LLM("smollm2", **common), LLM("smollm2", speculate=source, **common)
    report: dict[str, Any] = {"dtype": chosen.dtype, "random": chosen.random}
    for name, text in TEXTS.items():
        speeds: list[tuple[float, float]] = []
        before = drafted.statistics()["scheduler"]
        for _ in range(chosen.rounds):
            without, ids = measure(plain, text, chosen.tokens, clock)
            with_drafts, same = measure(drafted, text, chosen.tokens, clock)
            assert ids == same, f"{name}: other ids with drafts"
            speeds.append((without, with_drafts))
        after = drafted.statistics()["scheduler"]
        made = {key: after[key] - before[key] for key in ("num_drafted_tokens", "num_accepted_tokens")}
        share = made["num_accepted_tokens"] / max(1, made["num_drafted_tokens"])
        ratio = statistics.median(fast / slow for slow, fast in speeds)
        report[name] = {"plain": [round(a, 1) for a, _ in speeds], "drafted": [round(b, 1) for _, b in speeds]}
        report[name] |= {"ratio": round(ratio, 3), "accepted": round(share, 3), **made}
        print(
            f"{name}: {ratio:.2f} times plain, {share:.0%} of {made['num_drafted_tokens']} drafts accepted, ids equal"
        )
    report["pace"] = drafted.statistics()["draft_model"]
    plain.close()
    drafted.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
