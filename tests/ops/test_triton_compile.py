"""Every Triton kernel compiles for CUDA devices without one: no spilled registers, and shared memory that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
from tests.source_tree import ROOT
from tools import triton_compile
from tools.triton_compile import ARCHITECTURES, Compiled

pytest.importorskip("triton")


def compile_for(*architectures: int, seconds: float) -> list[Compiled]:
    """Run the tool in a process of its own, since this one's kernels are interpreted."""
    command = [sys.executable, "-m", "tools.triton_compile", "--json", "--arch", *map(str, architectures)]
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = msgspec.json.decode(done.stdout.splitlines()[-1])
    return [msgspec.convert(one, Compiled) for one in summary["results"]]


def check(results: list[Compiled], architectures: tuple[int, ...]) -> None:
    assert {one.architecture for one in results} == set(architectures)
    assert all(not one.faults and one.stack == one.local == 0 for one in results)
    assert max(one.shared for one in results) <= 99 << 10
    texts = {path.stem: path.read_text() for path in (ROOT / "src/octavo/ops/triton").glob("*.py")}
    launching = {name for name, text in texts.items() if "@torch.library.custom_op" in text}
    assert {one.kernel.split(".")[0] for one in results} == launching, "every file that launches kernels has variants"


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_hopper() -> None:
    check(compile_for(90, seconds=280), (90,))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_architecture() -> None:
    check(compile_for(*ARCHITECTURES, seconds=880), ARCHITECTURES)


def test_a_kernel_that_spills_or_lacks_its_product_is_a_fault() -> None:
    variant = SimpleNamespace(instruction="mma", options={"enable_fp_fusion": False})

    def faults(ptx: str = "mma.sync.aligned", architecture: int = 90, **sizes: int) -> list[str]:
        one = Compiled("a.kernel[0]", architecture, 0.0, **sizes)  # type: ignore[arg-type]
        return list(triton_compile.find_faults(one, variant, ptx))

    assert faults() == [] and faults("wgmma.mma_async") == [] and faults(shared=99 << 10) == []
    assert faults("tcgen05.mma", 100) == [] and faults("wgmma.mma_async", 80) == ["no mma.sync"]
    assert faults("add.f32") == ["no wgmma.mma_async or mma.sync"]
    assert faults(stack=8) == ["8 bytes of stack and 0 of local memory"] == faults(local=0, stack=8)
    assert faults(shared=(99 << 10) + 1)[0].endswith("at most 101376")
    assert faults(has_fused=True) == ["a fused multiply-add that the source has not"]


@pytest.mark.parametrize(("ptx", "llir", "is_fused"), [
    ("mul.rn.f32 add.rn.ftz.f32 div.full.f32 mad.lo.s32 add.s32", "fmul float", False),
    ("fma.rn.bf16", "fmul bfloat", False), ("fma.rn.f32 fma.rn.bf16", "fmul float", True),
    ("mul.f32", "fmul float", True), ("mul.ftz.f32", "fmul float", True), ("mul.bf16x2", "fmul bfloat", True),
    ("fma.rn.f32", "fmul float", True), ("fma.rn.ftz.f32", "fadd contract float", True),
    ("fma.rn.f32", "call <2 x float> @llvm.fma.v2f32(", False), ("fma.rn.f32", "@llvm.fmuladd.v32f32(", False),
    ("fma.rn.f64", "call double @llvm.nvvm.fma.rn.d(", False),
])  # fmt: skip
def test_a_fused_product_is_found_unless_the_source_has_it(ptx: str, llir: str, is_fused: bool) -> None:
    assert triton_compile.has_fused(ptx, llir) is is_fused
