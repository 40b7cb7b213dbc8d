"""mistral.rs in its own environment. Stand-alone: see host.py.

Its interface takes text, not token ids: prompts are decoded, and cut until they are encoded to no more tokens than
they had. Options: model (a .gguf file or a folder), threads, at_once, max_len, dtype. Written for the wheel 0.9.5.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from pathlib import Path
from typing import Any

MAX_CUTS = 4


class MistralrsHost:
    """One Runner, called by a thread for each open request."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("RAYON_NUM_THREADS", str(options["threads"]))
        self._api: Any = importlib.import_module("mistralrs")
        path = Path(options["model"]).absolute()
        if path.suffix == ".gguf":
            which = self._api.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        else:
            which = self._api.Which.Plain(model_id=str(path), dtype=self._api.ModelDType.BF16)
        self._runner = self._api.Runner(which=which, max_seqs=options["at_once"], token_source="none")
        kind = "gguf" if path.suffix == ".gguf" else "bfloat16"
        self.facts = {"engine": "mistral.rs", "dtype": kind, "note": "prompts as text; first token as it tells it"}

    def run(self, requests: list[dict[str, Any]], at_once: int) -> list[list[float]]:
        """Run the requests on `at_once` threads."""
        asked = [(self._text(request["prompt_token_ids"]), request["max_tokens"]) for request in requests]
        results: list[list[float]] = [[] for _ in requests]
        numbers = iter(range(len(asked)))
        lock = threading.Lock()
        failures: list[Exception] = []

        def work() -> None:
            while not failures:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    results[number] = self._one(*asked[number])
                except Exception as error:  # any exception ends the run
                    failures.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(asked)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    def _one(self, text: str, max_tokens: int) -> list[float]:
        begun = time.perf_counter()
        request = self._api.CompletionRequest(
            prompt=text, model="default", max_tokens=max_tokens, temperature=0.0, top_k=1, ignore_eos=True
        )
        usage = self._runner.send_completion_request(request).usage
        whole = time.perf_counter() - begun
        return [whole - usage.total_completion_time_sec, whole, usage.completion_tokens]

    def _text(self, ids: list[int]) -> str:
        text = self._runner.detokenize_text(ids, False)
        for _ in range(MAX_CUTS):
            again = self._runner.tokenize_text(text, False, None)
            if len(again) <= len(ids):
                break
            text = self._runner.detokenize_text(again[: len(ids)], False)
        return str(text)


ENGINE = MistralrsHost  # read by peers/host.py
