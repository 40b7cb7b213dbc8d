"""Check lm-eval's local-completions against a server: its numbers are transformers' on the same float32 weights.

What transformers gives is in lm_eval_reference.json, made by lm_eval_reference.py from lm_eval_task.jsonl beside this.
The tokenizer is the server's own, through /tokenize, /detokenize and /tokenizer_info.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from checking import MODEL, URL, run

CLIENT = "lm-eval"
PACKAGES = ["lm_eval[api]"]
SERVER = ["--model", "smollm2", "--dtype", "float32"]
HERE = Path(__file__).resolve().parent
MOST = 1e-3  # between two sums of log-probabilities

CHOICES = """
task: octavo_choices
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: octavo_rolling
output_type: loglikelihood_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


@cache
def samples(task: str, batch_size: int) -> list[dict[str, Any]]:
    """Every document's answers, in order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        for name, text in (("octavo_choices", CHOICES), ("octavo_rolling", ROLLING)):
            (Path(folder) / f"{name}.yaml").write_text(text.format(data=HERE / "lm_eval_task.jsonl"), encoding="utf-8")
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": MODEL,
                "base_url": f"{URL}/v1/completions",
                "tokenizer_backend": "remote",
                "num_concurrent": 1,
                "max_length": 2048,
            },
            tasks=[task],
            task_manager=TaskManager(include_path=folder),
            batch_size=batch_size,
            log_samples=True,
            bootstrap_iters=0,
        )
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


def expected() -> dict[str, Any]:
    """What transformers gives."""
    found: dict[str, Any] = json.loads((HERE / "lm_eval_reference.json").read_text(encoding="utf-8"))
    return found


def compare_choices(batch_size: int) -> None:
    """Each choice's log-likelihood, and whether greedy decoding would say it."""
    reference = expected()["choices"]
    found = [[resp[0] for resp in sample["resps"]] for sample in samples("octavo_choices", batch_size)]
    assert len(found) == len(reference) > 10
    for choices, answers in zip(reference, found, strict=True):
        for (loglikelihood, is_greedy), answer in zip(choices, answers, strict=True):
            assert abs(float(answer[0]) - loglikelihood) < MOST, (answer, loglikelihood)
            assert str(answer[1]) == str(is_greedy), (answer, is_greedy)


def check_loglikelihoods() -> None:
    """Log-likelihoods of choices equal transformers' within 1e-3, one request at a time."""
    compare_choices(1)


def check_batched_loglikelihoods() -> None:
    """The same with eight prompts in a request."""
    compare_choices(8)


def check_rolling_loglikelihoods() -> None:
    """Log-likelihoods of whole texts equal transformers' within 1e-3."""
    found = [float(sample["resps"][0][0]) for sample in samples("octavo_rolling", 1)]
    for value, wanted in zip(found, expected()["rolling"], strict=True):
        assert abs(value - wanted) < MOST, (value, wanted)


if __name__ == "__main__":
    sys.exit(run(__name__))
