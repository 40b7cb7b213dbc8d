"""Measure texts/s of an embedding model, in turns with transformers in batches of 32 (sorted by length, padded).

Usage: python tools/embedding_speed.py [MODEL] [--threads N] [--texts N] [--rounds N] [--quantization none|int8].
Octavo's engine gets all texts at once through LLM.embed, tokenizing included on both sides. The last line is one JSON
object: texts/s by tokens of a text, the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from octavo import LLM
from octavo.artifacts.resolve import resolve_model

LENGTHS = (32, 128)
BATCH = 32
_TEXT = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend"""
WORDS = _TEXT.split()


def make_texts(count: int, length: int, rng: random.Random) -> list[str]:
    """Return texts of about `length` tokens, two of them special, from half to one and a half times as long."""
    sizes = [max(1, round((length - 2) * rng.uniform(0.5, 1.5))) for _ in range(count)]
    return [" ".join(rng.choices(WORDS, k=size)) for size in sizes]


class TransformersBatches:
    """The same model in transformers: mean pooling, scaled to length 1."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> torch.Tensor:
        """Return a vector for each text, in order."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found = torch.empty(len(texts), self._model.config.hidden_size)
        for first in range(0, len(texts), BATCH):
            chosen = order[first : first + BATCH]
            batch = self._tokenizer([texts[index] for index in chosen], padding=True, return_tensors="pt")
            states = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].float()
            found[chosen] = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        return found


def main() -> None:
    """Run the rounds and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="all-minilm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    theirs = TransformersBatches(str(resolve_model(args.model).root))
    rng = random.Random(1)
    settings = {"threads": args.threads, "quantization": args.quantization, "dtype": args.dtype}
    figures: dict[str, Any] = {"model": args.model, **settings}
    with LLM(args.model, **settings) as llm:
        for length in LENGTHS:
            texts = make_texts(args.texts, length, rng)
            ours = torch.tensor([output.embedding for output in llm.embed(texts, use_tqdm=False)])
            difference = float((ours - theirs.embed(texts)).abs().max())
            sides: dict[str, Callable[[list[str]], object]] = {"octavo": llm.embed, "transformers": theirs.embed}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(args.rounds):
                for name, embed in sides.items():
                    started = time.perf_counter()
                    embed(texts)
                    times[name].append(time.perf_counter() - started)
            speeds = {name: round(args.texts / median(taken), 1) for name, taken in times.items()}
            ratio = median(b / a for a, b in zip(times["octavo"], times["transformers"], strict=True))
            print(f"{length} tokens: {speeds}, {ratio:.2f} times as fast; largest difference {difference:.1e}")
            figures[str(length)] = {**speeds, "ratio": round(ratio, 3), "difference": difference}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
