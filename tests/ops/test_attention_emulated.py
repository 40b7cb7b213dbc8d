"""The AVX-512 attention on machines without it: compiled over plain functions (emulated_avx512), against the reference.

Bounds: those of test_attention_kernel, which does the same for the instruction sets that this machine has.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ops.attention_rig import Rig, check_close, whole

from octavo.ops import attention_kernel, cpu
from octavo.ops.attention import KVPool, PoolShape

ROOT = Path(__file__).parents[2]
KINDS = [torch.float32, torch.bfloat16, torch.float16]
ALL_KINDS = [*KINDS, torch.int8, torch.float8_e4m3fn]
ROWS = ((1, 1), (16, 1), (17, 1), (129, 1), (300, 1), (9, 9), (132, 8), (200, 40))  # context and count: decodes first
BOUND = 4e-6


def over(kinds: list[torch.dtype]) -> pytest.MarkDecorator:
    """Run a test with pools of these kinds; only bfloat16 has instructions over pairs."""
    cases = [*((kind, False) for kind in kinds), (torch.bfloat16, True)]
    ids = [f"{str(kind).removeprefix('torch.')}-{'pairs' if pairs else 'avx512'}" for kind, pairs in cases]
    return pytest.mark.parametrize(("kind", "pairs"), cases, indirect=["pairs"], ids=ids)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library that knows AVX-512 only; built without OpenMP, it takes the shares of threads one after the other."""
    compiler = shutil.which("g++")
    if compiler is None or not (ROOT / "csrc").is_dir() or cpu.status().isa in ("", "portable"):
        pytest.skip("needs g++, the sources and an x86-64 machine with AVX2")
    here, target = Path(__file__).parent / "emulated_avx512", tmp_path_factory.mktemp("emulated") / "attention.so"
    sources = [ROOT / "csrc" / name for name in ("attention.cpp", "attention_avx512.cpp", "attention_avx512_bf16.cpp")]
    sources += [here / name for name in ("features.cpp", "attention_tables.cpp")]
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-w", "-Wno-psabi"]
    includes = ["-DOCTAVO_EMULATED", f"-I{here}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, *includes, *sources, "-o", target], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(autouse=True, params=[False, True], ids=["avx512", "pairs"])
def pairs(request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let every KernelAttention call the emulated functions, without and with the instructions over pairs."""
    library.octavo_use_extensions(int(request.param))
    library.octavo_attention.argtypes = [*[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int32]
    library.octavo_write_kv.argtypes = [c_void_p, c_void_p, c_int64, *(c_void_p, c_int64) * 2, c_int32]
    pair = library.octavo_attention, library.octavo_write_kv
    monkeypatch.setattr(attention_kernel, "_kernels", lambda: pair)
    return bool(request.param)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Plan and share the work as for so many threads."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)
        monkeypatch.setattr(cpu, "num_threads", lambda elements: count)

    return pretend


@over(ALL_KINDS)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
def test_equals_the_reference(kind: torch.dtype, head_dim: int, heads: tuple[int, int], pairs: bool) -> None:
    rig = Rig(kind, heads, head_dim, rows=ROWS)
    check_close(rig.run(whole(ROWS)), rig.reference(), pairs)


@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 256), ((7, 1), 16), ((100, 1), 40)])
def test_the_widest_heads_and_groups(heads: tuple[int, int], head_dim: int, pairs: bool) -> None:
    rows = ((130, 1), (40, 5))
    rig = Rig(torch.bfloat16, heads, head_dim, rows=rows)
    check_close(rig.run(whole(rows)), rig.reference(), pairs)


@over(ALL_KINDS)
@pytest.mark.parametrize("window", [1, 7, 128, 150])
def test_windows(kind: torch.dtype, window: int, pairs: bool) -> None:
    rig = Rig(kind, (3, 1), rows=ROWS, block=24)
    check_close(rig.run(whole(ROWS), window), rig.reference(window), pairs)


@pytest.mark.parametrize("soft_cap", [0.3, 5.0, 50.0])
def test_a_soft_cap_bends_the_scores(soft_cap: float) -> None:
    rig = Rig(torch.float32, (3, 1), rows=((150, 150),))
    at = torch.from_numpy(rig.table[0])[torch.arange(150) // 16] * 16 + torch.arange(150) % 16
    keys, values = (pool[0].flatten(0, 1)[at, 0].double() for pool in (rig.pool.keys, rig.pool.values))
    scores = torch.einsum("thd,sd->hts", rig.query[0].double(), keys) * 64**-0.5
    scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hts,sd->thd", scores.softmax(-1), values).float()
    torch.testing.assert_close(rig.run(whole(rig.rows), soft_cap=soft_cap), expected, atol=BOUND, rtol=BOUND)


@over(ALL_KINDS)
@pytest.mark.parametrize(("head_dim", "window", "soft_cap"), [(64, None, None), (80, 131, None), (24, None, 5.0)])
def test_a_token_has_the_same_bits_alone_and_in_any_chunk(
    kind: torch.dtype, head_dim: int, window: int | None, soft_cap: float | None
) -> None:
    rig = Rig(kind, (6, 2), head_dim, rows=ROWS)
    together = rig.split(rig.run(whole(ROWS), window, soft_cap=soft_cap))
    for row, (context, count) in enumerate(ROWS):
        for chunk in {1, 7, count} if count < 40 else {7, count}:
            starts = range(context - count, context, chunk)
            parts = [
                rig.run([(row, start, min(start + chunk, context))], window, soft_cap=soft_cap) for start in starts
            ]
            assert torch.equal(torch.cat(parts), together[row]), (row, chunk)


@over(ALL_KINDS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 1)])
def test_a_shared_prefix_and_threads_change_no_bit(
    kind: torch.dtype, heads: tuple[int, int], threads: Callable[[int], None], pairs: bool
) -> None:
    rows = ((100, 1), (270, 1), (290, 1), (300, 1), (300, 9))
    rig = Rig(kind, heads, rows=rows, shared=256)
    for count in (1, 2, 5):
        threads(count)
        backend = rig.kernel()
        together = rig.attend(backend, whole(rows))
        assert backend.plan.shared_parts == 2
        for row, output in zip(whole(rows), rig.split(together), strict=True):
            assert torch.equal(rig.run([row]), output)
    check_close(together, rig.reference(), pairs)


@over(KINDS)
def test_what_is_not_finite_stays_in_its_row_and_behind_a_context_nothing_is_read(kind: torch.dtype) -> None:
    rig = Rig(kind, rows=ROWS)
    clean = rig.split(rig.run(whole(ROWS)))
    size = rig.pool.shape.block_size
    for row, (context, _) in enumerate(ROWS):
        for pool in (rig.pool.keys[0], rig.pool.values[0]):
            pool[rig.table[row, (context - 1) // size], (context - 1) % size + 1 :] = float("nan")
    rig.pool.keys[0][rig.table[3, 0], 0] = float("nan")
    rig.pool.values[0][rig.table[4, 2], 1] = float("inf")
    for row, broken in enumerate(rig.split(rig.run(whole(ROWS)))):
        assert broken.isfinite().all() == (row not in (3, 4))
        assert row in (3, 4) or torch.equal(broken, clean[row])


def test_scores_of_any_size_keep_the_weights_a_distribution() -> None:
    rig = Rig(torch.float32, rows=ROWS)
    rig.query = [query * 1e4 for query in rig.query]
    # floats are 4e-3 apart where these scores are
    torch.testing.assert_close(rig.run(whole(ROWS)), rig.reference(), atol=2e-2, rtol=2e-2)
    rig.pool.values[0].fill_(1.0)
    output = rig.run(whole(ROWS))
    torch.testing.assert_close(output, torch.ones_like(output))


@over(KINDS)
def test_keys_and_values_are_rounded_as_torch_rounds(kind: torch.dtype) -> None:
    random = np.random.default_rng(0)
    bits = torch.from_numpy(random.integers(0, 2**32, 1000, dtype=np.uint32).view(np.float32))
    small = torch.from_numpy(random.standard_normal(1000).astype(np.float32)) * 10.0 ** (torch.arange(1000) % 15 - 9)
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 2.0**-25, 2.0**-24 * 1.5, 2.0**-14, 1 / 3, 3e38])
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    edges = torch.cat((edges, nans, -edges))  # 24
    k_TKD, v_TKD = torch.cat((bits, edges)).view(64, 2, 8), torch.cat((small, -edges)).view(64, 2, 8)
    pool = KVPool(PoolShape(1, 8, 8, 2, 8, 8, kind), torch.device("cpu"))
    rig = Rig(torch.float32, (2, 2), rows=((64, 64),), block=8, head_dim=8)
    rig.pool = pool
    backend, batch = rig.kernel(), rig.batch([(0, 0, 64)])
    backend.begin(batch)
    backend.attend(0, torch.zeros(64, 2, 8), k_TKD, v_TKD)
    for written, given in ((pool.keys[0], k_TKD), (pool.values[0], v_TKD)):
        expected, found = given.to(kind), written.flatten(0, 1)[batch.slot_mapping_T]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())
