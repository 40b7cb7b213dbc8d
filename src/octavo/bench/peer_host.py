"""Runs one engine in that engine's own Python environment, and times requests there. Imports only the standard library.

Usage: PYTHON peer_host.py ENGINE OPTIONS_JSON, where ENGINE is a key of ENGINES.
Owns: adapters for vLLM, transformers, mistral.rs and this engine; the protocol: one line of JSON on stdin for requests,
one on stdout for times. The engines' own output is written to stderr. An adapter has `facts` and
run(requests, at_once), which returns [seconds to first token, seconds to last token, tokens] per request, in any order.
Invariant: if an engine fails, the process writes a line with `error` and ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

# Modules beside this file have names that other engines import.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

Options = dict[str, Any]
Requests = list[dict[str, Any]]
Times = list[list[float]]


class SteppedEngine(ABC):
    """Base class for engines whose outputs are polled: keeps up to `at_once` requests open until all have finished."""

    facts: dict[str, Any]

    @abstractmethod
    def add(self, index: int, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Submit the request of this index."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Return (index, number of new tokens, is finished) for each request with new output."""

    def run(self, requests: Requests, at_once: int) -> Times:
        """Return the times of all requests."""
        start_s = [0.0] * len(requests)
        token_s: list[list[float]] = [[] for _ in requests]
        next_index = num_open = 0
        while next_index < len(requests) or num_open:
            while next_index < len(requests) and num_open < at_once:
                request = requests[next_index]
                start_s[next_index] = time.perf_counter()
                self.add(next_index, request["prompt_token_ids"], request["max_tokens"])
                next_index += 1
                num_open += 1
            for index, num_new, is_finished in self.step():
                token_s[index] += [time.perf_counter()] * num_new
                num_open -= is_finished
        return [[own[0] - start, own[-1] - start, len(own)] for start, own in zip(start_s, token_s, strict=True)]


class VllmEngine(SteppedEngine):
    """vLLM's engine, stepped by hand. Written for vLLM 0.32. Options: model, threads, at_once, max_len, dtype."""

    def __init__(self, options: Options) -> None:
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options['threads'] - 1}",
            "OMP_NUM_THREADS": str(options["threads"]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            os.environ.setdefault(name, value)
        vllm = importlib.import_module("vllm")
        self._sampling: Any = importlib.import_module("vllm.sampling_params")
        self._llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_num_seqs=options["at_once"],
            max_model_len=options["max_len"],
            max_num_batched_tokens=int(os.environ.get("MAX_NUM_BATCHED_TOKENS", "2048")),
            enable_prefix_caching=True,
            seed=0,
        )
        self._engine = self._llm.llm_engine
        self._num_added = 0
        self._index_of: dict[str, int] = {}
        self.facts = {"engine": f"vllm {vllm.__version__}", "dtype": options["dtype"]}

    def add(self, index: int, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Submit the request of this index."""
        name = f"r{self._num_added}"
        self._num_added += 1
        self._index_of[name] = index
        params = self._sampling.SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=self._sampling.RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt_token_ids}, params)

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Run one step of the engine. vLLM may add a suffix to a request's name."""
        for output in self._engine.step():
            index = self._index_of.get(output.request_id)
            if index is None:
                index = self._index_of[output.request_id.partition("-")[0]]
            yield index, sum(len(choice.token_ids) for choice in output.outputs), bool(output.finished)


class TransformersEngine(SteppedEngine):
    """transformers' continuous batching. Written for 5.23. Options: model, threads, at_once, max_len, dtype.

    The model is a folder or a .gguf file; transformers dequantises a .gguf file.
    """

    def __init__(self, options: Options) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        torch = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        settings: Any = importlib.import_module("transformers.generation.configuration_utils")
        torch.set_num_threads(options["threads"])
        path = Path(options["model"])
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            where["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, options["dtype"])
        ).eval()
        model.set_attn_implementation("sdpa")
        generation = transformers.GenerationConfig(
            max_new_tokens=options["max_len"], do_sample=False, eos_token_id=-1, pad_token_id=2
        )
        batching = settings.ContinuousBatchingConfig(
            page_size=32,
            num_blocks=1024,
            max_batch_tokens=512,
            max_requests_per_batch=options["at_once"],
            allow_block_sharing=True,
            use_cuda_graph=False,
        )
        self._context = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        )
        self._manager = self._context.__enter__()
        self._open: dict[str, tuple[int, int]] = {}  # name -> (index, tokens so far)
        self.facts = {"engine": f"transformers {transformers.__version__}", "dtype": options["dtype"]}

    def add(self, index: int, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Submit the request of this index."""
        name = self._manager.add_request(
            input_ids=prompt_token_ids, max_new_tokens=max_tokens, eos_token_id=-1, streaming=True
        )
        self._open[name] = index, 0

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Wait up to a second for an output."""
        output = self._manager.get_result(timeout=1)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the batching manager ended")
            return
        if output.error is not None:
            raise RuntimeError(str(output.error))
        index, num_seen = self._open[output.request_id]
        count = len(output.generated_tokens)
        self._open[output.request_id] = index, count
        yield index, count - num_seen, bool(output.is_finished())


class MistralrsEngine:
    """mistral.rs: one Runner, with one calling thread for each open request. Written for the wheel 0.9.5.

    Options: model (a .gguf file or a folder), threads, at_once. Runner takes text, not token ids, so each prompt is
    decoded to text. The text is cut until it encodes to at most the prompt's number of tokens.
    """

    MAX_CUTS = 4

    def __init__(self, options: Options) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("RAYON_NUM_THREADS", str(options["threads"]))
        self._api: Any = importlib.import_module("mistralrs")
        path = Path(options["model"]).absolute()
        if path.suffix == ".gguf":
            which = self._api.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        else:
            which = self._api.Which.Plain(model_id=str(path), dtype=self._api.ModelDType.BF16)
        self._runner = self._api.Runner(which=which, max_seqs=options["at_once"], token_source="none")
        dtype = "gguf" if path.suffix == ".gguf" else "bfloat16"
        self.facts = {"engine": "mistral.rs", "dtype": dtype, "note": "prompts as text; first token as it reports it"}

    def run(self, requests: Requests, at_once: int) -> Times:
        """Run the requests on `at_once` threads."""
        prompts = [self._text(request["prompt_token_ids"]) for request in requests]
        with ThreadPoolExecutor(min(at_once, len(requests))) as pool:
            return list(pool.map(self._complete, prompts, (request["max_tokens"] for request in requests)))

    def _complete(self, text: str, max_tokens: int) -> list[float]:
        start = time.perf_counter()
        request = self._api.CompletionRequest(
            prompt=text, model="default", max_tokens=max_tokens, temperature=0.0, top_k=1, ignore_eos=True
        )
        usage = self._runner.send_completion_request(request).usage
        whole_s = time.perf_counter() - start
        return [whole_s - usage.total_completion_time_sec, whole_s, usage.completion_tokens]

    def _text(self, ids: list[int]) -> str:
        text = self._runner.detokenize_text(ids, False)
        for _ in range(self.MAX_CUTS):
            again = self._runner.tokenize_text(text, False, None)
            if len(again) <= len(ids):
                break
            text = self._runner.detokenize_text(again[: len(ids)], False)
        return str(text)


class OctavoEngine:
    """This engine, in its own process. Options: model, at_once, settings (a mapping from Config's field names)."""

    def __init__(self, options: Options) -> None:
        names = ("octavo.assembly", "octavo.bench.offline", "octavo.config.sources")
        assembly, offline, sources = map(importlib.import_module, names)
        settings = {"max_sequences": options["at_once"], **options["settings"]}
        config = sources.config_from_keywords(options["model"], settings)
        local = assembly.build_local(config)
        recorder = offline.StepRecorder(local.loop)
        self._make_bench: Callable[[int], Any] = partial(offline.OfflineBench, local.client, recorder)
        self._loop = asyncio.new_event_loop()
        self.facts = {"engine": "octavo", **offline.engine_facts(local.text.name, config, local.capacity)}

    def run(self, requests: Requests, at_once: int) -> Times:
        """Run one pass of the offline benchmark."""
        workload = importlib.import_module("octavo.bench.workload")
        items = tuple(workload.Item(array("i", one["prompt_token_ids"]), one["max_tokens"]) for one in requests)
        name = f"run {time.monotonic()}"
        bench = self._make_bench(at_once)
        record = self._loop.run_until_complete(bench.run(workload.BenchWorkload(name, (items,))))
        return [list(times) for times in record.requests]


ENGINES: dict[str, Callable[[Options], Any]] = {
    "octavo": OctavoEngine,
    "vllm": VllmEngine,
    "transformers": TransformersEngine,
    "mistralrs": MistralrsEngine,
}


def serve(make_engine: Callable[[Options], Any], options: Options) -> None:
    """Open the engine, write its facts, and answer each line of requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine = make_engine(options)
        write(ready=True, facts=engine.facts)
        for line in sys.stdin:
            message = json.loads(line)
            start = time.perf_counter()
            requests = engine.run(message["requests"], message["at_once"])
            write(seconds=time.perf_counter() - start, requests=requests)
    except Exception as error:  # process boundary: report any exception of another engine
        write(error=f"{type(error).__name__}: {error}"[:2000])
        os._exit(1)
    os._exit(0)  # some engines' background threads never end


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]], json.loads(sys.argv[2]))
