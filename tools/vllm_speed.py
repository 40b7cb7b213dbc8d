"""Measure vLLM's decode steps as tools.gpu_check measures Octavo's; run by it, in the Python that has vLLM.

    python tools/vllm_speed.py '{"model": FOLDER, "batches": [1, 8], "context": 1024, "outputs": 64, "share": 0.9}'

A step's time is the difference of answers of outputs + 1 tokens and of one token, so that prompts do not count. The
last line is one JSON object: the version and each batch size's figures, or `missing`: why vllm cannot be imported. It
needs nothing else of this repository, since vLLM is often in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def make_prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts of different ids, which share no prefix."""
    return [[100 + (17 * number + (31 + number) * at) % 900 for at in range(length)] for number in range(1, count + 1)]


def measure(vllm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each batch size."""
    context, outputs = asked["context"], asked["outputs"]
    llm = vllm.LLM(
        model=asked["model"],
        skip_tokenizer_init=True,  # prompts are ids, and a folder of random weights has no tokenizer
        max_model_len=context + outputs + 8,
        max_num_seqs=max(asked["batches"]),
        gpu_memory_utilization=asked["share"],
        enable_prefix_caching=False,
        seed=0,
    )

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started_at = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        took = time.perf_counter() - started_at
        counts = {len(answer.outputs[0].token_ids) for answer in answers}
        if len(answers) != len(prompts) or counts != {num_tokens}:
            raise RuntimeError(f"{len(answers)} answers of {sorted(counts)} tokens, not {len(prompts)} of {num_tokens}")
        return took

    batches: dict[str, dict[str, float]] = {}
    for batch in asked["batches"]:
        prompts = make_prompts(batch, context)
        seconds(prompts, 2)  # what is compiled or allocated at first use
        step_s = max(1e-9, seconds(prompts, outputs + 1) - seconds(prompts, 1)) / outputs
        batches[str(batch)] = {"tokens_s": round(batch / step_s, 1), "step_ms": round(1000 * step_s, 3)}
    return {"version": vllm.__version__, "batches": batches}


def main() -> None:
    """Print the figures."""
    asked = json.loads(sys.argv[1])
    try:
        import vllm
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    print(json.dumps(measure(vllm, asked)), flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
