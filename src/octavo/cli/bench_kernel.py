"""`octavo bench kernel`: the kernels of a step, each alone.

Owns: the arguments, the list of kernel modules, the tables. Does not: measure (bench does).
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from octavo.bench.kernel_table import KernelTable, Sizes
from octavo.bench.table import show_rows
from octavo.cli.bench_arguments import check_at_least
from octavo.cli.flags import UsageError
from octavo.cli.terminal import say
from octavo.machine import look, usable_cores

ROWS = (1, 8, 32, 128)
MODULES = {
    "rows": "octavo.bench.kernel_rows",
    "linear": "octavo.bench.kernel_linear",
    "attention": "octavo.bench.kernel_attention",
}
MORE = {"masks": "octavo.bench.kernel_masks"}  # whole steps of the default model: measured only on request
NAMES = f"of {', '.join(MODULES)} [all], and {', '.join(MORE)}, for which the default model is loaded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--kernels", nargs="+", choices=(*MODULES, *MORE), metavar="NAME", help=NAMES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N", help="rows of a step")
    parser.add_argument("--threads", type=int, default=usable_cores(), metavar="N", help="threads [all cores]")
    parser.add_argument("--budget", type=float, default=0.2, metavar="S", help="seconds that one time may take [0.2]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def linear_tables(module: Any, sizes: Sizes) -> list[KernelTable]:
    """Return a table for each layer of a module that has SHAPES and measure(layer, rows, threads)."""
    tables = []
    for layer, (outputs, inputs) in module.SHAPES.items():
        figures = [
            {"rows": count, **asdict(figure)}
            for count in sizes.rows
            for figure in module.measure(layer, count, sizes.threads)
        ]
        columns = [name for name in figures[0] if name not in ("layer", "num_rows")]
        rows = [[figure[name] for name in columns] for figure in figures]
        tables.append(KernelTable(f"{layer}: {outputs} outputs of {inputs} inputs", columns, rows))
    return tables


def attention_tables(module: Any, sizes: Sizes) -> list[KernelTable]:
    """Return the one table of a module that has COLUMNS and measure(limits); its limits are probed here."""
    import torch

    from octavo.bench.machine_probe import probe

    torch.set_num_threads(sizes.threads)
    rates = probe("cpu", "float32", look().cache_bytes)
    rows = module.measure(module.Limits(rates.bandwidth, rates.flops))
    return [KernelTable("attention, one layer, in float32 and bfloat16 pools", module.COLUMNS, rows)]


TABLES: dict[str, Callable[[Any, Sizes], list[KernelTable]]] = {
    "rows": lambda module, sizes: list(module.tables(sizes)),
    "linear": linear_tables,
    "attention": attention_tables,
    "masks": lambda module, sizes: list(module.tables(sizes)),
}


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table for each kernel or one JSON object."""
    check_at_least(args, 1, "rows", "threads")
    if not 0 < args.budget <= 60:
        raise UsageError(f"--budget is {args.budget:g}; give seconds above 0, at most 60")
    sizes = Sizes(tuple(args.rows), args.threads, args.budget)
    tables: list[KernelTable] = []
    for name in args.kernels or MODULES:
        path = (MODULES | MORE)[name]
        if find_spec(path) is None:
            say(f"kernels of {name} are not measured: this build has no {path}")
            continue
        module: Any = importlib.import_module(path)
        tables += TABLES[name](module, sizes)
    if not args.json:
        console = Console()
        console = console if console.is_terminal else Console(width=120)
        for table in tables:
            show_rows(console, table.title, table.columns, table.rows)
            console.print()
    report = {"bench": "kernel", "threads": args.threads, "cpu": look().cpu_name}
    if args.json:
        print(json.dumps({**report, "tables": [table.as_dict() for table in tables]}))
    return 0
