"""Compile every Triton kernel for CUDA devices without a device, and check what the compiler made of it.

    python -m tools.triton_compile [--arch 80 90] [--kernel attention] [--jobs 2] [--json]

Each entry of VARIANTS in octavo/ops/triton/*.py is compiled for each architecture, in processes without
TRITON_INTERPRET. A kernel fails if it needs a stack or local memory (spilled registers), more than 99 KB of shared
memory (what every architecture from sm_80 on gives a block), or lacks its tensor core instruction; or if it has, or its
assembler may make, a fused multiply-add where the variant forbids it. Exit status 1 if one fails. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 89, 90, 100, 120)
MAX_SHARED = 99 << 10
PACKAGE = "octavo.ops.triton"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_PRODUCTS = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync")
# The assembler never fuses a product that has a rounding modifier, such as mul.rn.f32 (PTX ISA, "mul").
_MAY_FUSE = re.compile(r"\bmul\.(?:ftz\.|sat\.)*b?f(?:16|32|64)")
_FUSED = re.compile(r"\bfma\.rn\.(?:ftz\.|sat\.)*f(?:32|64)")  # of 16 bits, it is sm_80's only product and sum
_ASKED = re.compile(r"@llvm\.(?:nvvm\.)?fma|@llvm\.fmuladd")
# What multiplies matrices on each architecture, widest first; small tiles use mma.sync everywhere.
PRODUCTS = {90: ("wgmma.mma_async", "mma.sync"), 100: ("tcgen05.mma", "mma.sync")}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel on one architecture, with its sizes in bytes, or the error of compiling it."""

    kernel: str
    architecture: int
    seconds: float
    registers: int = 0
    stack: int = 0
    local: int = 0
    shared: int = 0
    products: tuple[str, ...] = ()
    has_fused: bool = False
    faults: tuple[str, ...] = ()


def modules() -> list[str]:
    """Return the names of the modules with kernels."""
    package = importlib.import_module(PACKAGE)
    return [module.name for module in pkgutil.iter_modules(package.__path__, f"{PACKAGE}.")]


def count_variants(module: str) -> int:
    """Return the number of a module's variants."""
    return len(getattr(importlib.import_module(module), "VARIANTS", ()))


def compile_one(module: str, index: int, architecture: int) -> Compiled:
    """Compile a module's variant and check the result. Needs a process without TRITON_INTERPRET."""
    variant = importlib.import_module(module).VARIANTS[index]
    kernel = f"{module.rpartition('.')[2]}.{variant.kernel.fn.__name__}[{index}]"
    started_at = time.perf_counter()
    try:
        made = _compile(variant, architecture)
        usage = _USAGE.search(_resource_usage(made.asm["cubin"]))
    except Exception as error:  # the shell: whatever the compiler raises is this kernel's result
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return Compiled(kernel, architecture, time.perf_counter() - started_at, faults=(text,))
    assert usage is not None, "cuobjdump prints the resources"
    registers, stack, static, local = map(int, usage.groups())
    found = Compiled(
        kernel,
        architecture,
        time.perf_counter() - started_at,
        registers,
        stack,
        local,
        max(static, made.metadata.shared),
        tuple(sorted(set(_PRODUCTS.findall(made.asm["ptx"])))),
        has_fused(made.asm["ptx"], made.asm["llir"]),
    )
    faults = tuple(find_faults(found, variant, made.asm["ptx"]))
    return Compiled(**(asdict(found) | {"faults": faults}))


def _compile(variant: Any, architecture: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(inspect.signature(variant.kernel.fn).parameters)
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    unknown = {*variant.signature, *variant.constants, *variant.aligned} - set(names)
    missing = [name for name in names if name not in variant.signature and name not in variant.constants]
    if unknown or missing:
        raise ValueError(f"the variant names {sorted(unknown)}, which the kernel has not, and lacks {missing}")
    aligned = {name for name, kind in variant.signature.items() if kind.startswith("*")} | set(variant.aligned)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    options = {**variant.options, "num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def _resource_usage(cubin: bytes) -> str:
    """Run the tool that Triton brings for it."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout


def has_fused(ptx: str, llir: str) -> bool:
    """Return True if there is, or may be, a fused multiply-add in the machine code that LLVM was not asked for."""
    is_asked = _ASKED.search(llir) is not None
    return _MAY_FUSE.search(ptx) is not None or (_FUSED.search(ptx) is not None and not is_asked)


def find_faults(found: Compiled, variant: Any, ptx: str) -> Iterator[str]:
    """Yield what is wrong with a compiled kernel, whose variant and PTX these are."""
    if found.stack or found.local:
        yield f"{found.stack} bytes of stack and {found.local} of local memory"
    if found.shared > MAX_SHARED:
        yield f"{found.shared} bytes of shared memory, at most {MAX_SHARED}"
    if variant.instruction is not None:
        allowed = PRODUCTS.get(found.architecture, ("mma.sync",))
        if not any(name in ptx for name in allowed):
            yield f"no {' or '.join(allowed)}"
    if found.has_fused and variant.options.get("enable_fp_fusion") is False:
        yield "a fused multiply-add that the source has not"


def compile_all(architectures: list[int], kernel: str = "", jobs: int = 2) -> list[Compiled]:
    """Compile the variants of the modules whose name contains `kernel`, in `jobs` processes."""
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported, which only the children do
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        names = [name for name in pool.submit(modules).result() if kernel in name]
        names.reverse()  # the sampler's kernels take longest, so they begin
        counts = list(pool.map(count_variants, names))
        work = [
            (name, index, architecture)
            for name, count in zip(names, counts, strict=True)
            for index in range(count)
            for architecture in architectures
        ]
        return list(pool.map(compile_one, *zip(*work, strict=True))) if work else []


def main(arguments: list[str] | None = None) -> int:
    """Print a line per kernel and architecture, then one JSON object; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--kernel", default="", help="part of a module's name")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true", help="print every result in the JSON object")
    args = parser.parse_args(arguments)
    started_at = time.perf_counter()
    results = compile_all(args.arch, args.kernel, args.jobs)
    for one in results:
        sizes = f"{one.registers:3d} registers {one.shared:6d} shared {one.stack + one.local:4d} spilled"
        state = "; ".join(one.faults) or ", ".join(one.products) or "-"
        print(f"sm_{one.architecture:<4} {one.kernel:40} {one.seconds:5.1f} s  {sizes}  {state}")
    failed = [one for one in results if one.faults]
    summary: dict[str, Any] = {
        "kernels": len({one.kernel for one in results}),
        "compiled": len(results),
        "failed": len(failed),
        "seconds": round(time.perf_counter() - started_at, 1),
    }
    if args.json:
        summary["results"] = [asdict(one) for one in results]
    print(json.dumps(summary))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
