"""`octavo simulate --compare`: shows saved runs side by side.

Owns: the printed text and the page's title. Does not: read the files (simulator.saved), or lay out (simulator.report).
"""

from __future__ import annotations

import argparse

from octavo.cli.flags import UsageError, write_text
from octavo.simulator.report import advice_lines, comparison_table, page
from octavo.simulator.saved import read_cases

COMPARED = ("mean", "p99")  # statistics of latencies in a comparison


def compare_saved_runs(args: argparse.Namespace) -> int:
    """Print, and with --html draw, the runs of the files of --compare. Raises ConfigError, UsageError."""
    if args.workload or args.search or args.json:
        raise UsageError("--compare looks at saved runs alone; leave out --workload, --search and --json")
    cases, settings = read_cases(args.compare)
    unlike = {name: texts for name, texts in settings.items() if len({*texts}) > 1}
    for name, texts in unlike.items():
        print(f"{name:28}" + "".join(f"{text[:22]:>24}" for text in texts))
    advice = advice_lines(cases)
    for line in advice:
        print(f"{'advice':12}{line}")
    print()
    print("\n".join(comparison_table(cases, [case.label[:22] for case in cases], 24, COMPARED)))
    if args.html:
        same = {name: [texts[0]] for name, texts in settings.items() if name not in unlike}
        alike = [f"{name}: {same[name][0]}" for name in ("workload", "model", "device") if name in same]
        title = "Simulations: " + ", ".join(case.label for case in cases)
        write_text(args.html, page(title, cases, settings, alike, advice))
    return 0
