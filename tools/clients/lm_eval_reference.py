"""Make lm_eval_reference.json: what transformers computes for lm_eval_task.jsonl on the default model in float32.

Run it with the project's own environment (the test extra has transformers): python tools/clients/lm_eval_reference.py
The ids are Octavo's, since the served tokenizer makes those of the check; the arithmetic is transformers' alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from octavo.artifacts.resolve import resolve_model
from octavo.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Compute and write."""
    files = resolve_model("smollm2")
    tokenizer = Tokenizer.from_files(files)
    weights = files.weights[0]
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def score(context: list[int], answer: list[int]) -> tuple[float, bool]:
        with torch.no_grad():
            logits = model(torch.tensor([context + answer])).logits[0].float()
        rows = torch.log_softmax(logits[len(context) - 1 : -1], dim=-1)
        own = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float(own.sum()), bool((rows.argmax(dim=-1) == torch.tensor(answer)).all())

    choices: list[list[Any]] = []
    rolling: list[float] = []
    for line in (HERE / "lm_eval_task.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        context = encode(document["question"])
        wholes = [encode(f"{document['question']} {choice}") for choice in document["choices"]]
        choices.append([score(whole[: len(context)], whole[len(context) :]) for whole in wholes])
        assert tokenizer.bos_token_id is not None
        rolling.append(score([tokenizer.bos_token_id], context)[0])
    content = json.dumps({"choices": choices, "rolling": rolling}, indent=1)
    (HERE / "lm_eval_reference.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
