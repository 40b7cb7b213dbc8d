"""Print the simulator's errors against measurements.

Usage: python -m tools.fidelity vllm [--fit] [CASE ...] | published | own DIR [--runs N] [--offline] [-- OPTIONS]
       python -m tools.fidelity fleet DIR [--runs N] [--kind machines|replicas] [--requests N] [-- SETTINGS]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tools.fidelity import fleet_runs, own_runs, vllm_runs
from tools.fidelity.closeness import charts, table
from tools.fidelity.published import points, summary

from octavo.fleet.fleet_router import DEFAULT_ROUTER
from octavo.simulator.charts import Chart, draw_alone


def vllm(names: list[str], fits: bool, picture: Path | None) -> int:
    """Simulate the measured runs with the table, with facts alone, and (--fit) with a table corrected by a part."""
    if not (vllm_runs.DATA / "measured_vllm").is_dir():
        print(f"no {vllm_runs.DATA / 'measured_vllm'}: the measured runs are not here", file=sys.stderr)
        return 1
    if unknown := [name for name in names if name not in vllm_runs.CASES]:
        print(f"no case {unknown[0]!r}; give {' or '.join(vllm_runs.CASES)}", file=sys.stderr)
        return 2
    drawn: list[Chart] = []
    for name in names or list(vllm_runs.CASES):
        run = vllm_runs.MeasuredRun(vllm_runs.CASES[name])
        costs = run.table_costs()
        shown = {"measured": run.measured}
        print(f"\n### {run.case.folder}, {len(run.workload)} requests, tp {run.case.tp}\n")
        for title, model in (("table", costs), ("roofline", run.roofline_costs())):
            result, predicted = run.simulate(model)
            shown[title] = predicted
            print(table(title, predicted, run.measured))
            print(f"\n{result.replicas[0].steps} steps, {result.replicas[0].preemptions} preemptions\n")
        drawn += charts(run.case.folder.replace("__", ", "), shown)
        if fits:
            print(vllm_runs.fit_table(run, costs))
    if picture is not None:
        picture.write_text(draw_alone(drawn), encoding="utf-8")
    return 0


def published() -> int:
    """Compare the roofline with published measurements."""
    if not (vllm_runs.DATA / "aiconfigurator").is_dir():
        print(f"no {vllm_runs.DATA / 'aiconfigurator'}: the measurements are not here", file=sys.stderr)
        return 1
    print(summary(points(vllm_runs.DATA)))
    return 0


def own(folder: Path, runs: int, options: list[str]) -> int:
    """Record runs of this engine where they are not there, and predict each from its first third."""
    folder.mkdir(parents=True, exist_ok=True)
    predictions = []
    for number in range(runs):
        path = own_runs.record(folder, number, options)
        predictions.append(own_runs.predict(path))
        print(f"\n### {path.name}\n\n{predictions[-1].fits[0].report()}\n")
        print(table("after the first third", predictions[-1].predicted, predictions[-1].measured), flush=True)
    print(f"\n### all runs\n\n{own_runs.verdict(predictions)}")
    return 0


def batches(folder: Path, runs: int, options: list[str]) -> int:
    """Record offline runs of this engine where they are not there, and predict each from its first pass."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [own_runs.record(folder, number, options, "offline") for number in range(runs)]
    print(own_runs.batch_verdict([own_runs.predict_batches(path) for path in paths]))
    return 0


def fleets(folder: Path, runs: int, kinds: list[str], spec: fleet_runs.FleetSpec, settings: list[str]) -> int:
    """Record fleets of this engine where they are not there, and predict each from its first third."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for kind in kinds:
        for number in range(runs):
            path = fleet_runs.record_fleet(folder, kind, number, settings, replace(spec, seed=number))
            one = found[path.name] = fleet_runs.predict_fleet(path)
            print(f"\n### {path.name}\n")
            print("\n\n".join(fit.report() for fit in one.times.fits))
            for title, predicted in (("after the first third", one.times.predicted), ("recorded choices", one.routed)):
                print(f"\n{table(title, predicted, one.times.measured)}", flush=True)
    print(f"\n### all runs\n\n{own_runs.verdict([one.times for one in found.values()])}")
    print(f"\n{fleet_runs.fleet_verdict(found)}")
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fidelity", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("vllm", help="the measured runs of vLLM")
    runs.add_argument("case", nargs="*", metavar="CASE", help=", ".join(vllm_runs.CASES))
    runs.add_argument("--fit", action="store_true", help="correct the table by some requests, predict others")
    runs.add_argument("--svg", type=Path, help="draw e2e and tpot there")
    verbs.add_parser("published", help="published measurements of datacentre GPUs")
    mine = verbs.add_parser("own", help="recorded runs of this engine; options of octavo bench online go behind --")
    mine.add_argument("folder", type=Path, help="where the recordings are, or shall be")
    mine.add_argument("--runs", type=int, default=1)
    mine.add_argument(
        "--offline", action="store_true", help="octavo bench offline instead; give it --runs of its own, 2+"
    )
    many = verbs.add_parser("fleet", help="recorded fleets of this engine; settings of engines go behind --")
    many.add_argument("folder", type=Path, help="where the recordings are, or shall be")
    many.add_argument("--runs", type=int, default=1, help="of each kind [1]")
    many.add_argument("--kind", choices=fleet_runs.KINDS_OF_FLEET, help="engines that join, or the front's own [both]")
    many.add_argument("--engines", type=int, default=2, help="of a fleet [2]")
    many.add_argument("--router", default=DEFAULT_ROUTER, help=f"of the front [{DEFAULT_ROUTER}]")
    many.add_argument("--requests", type=int, default=240)
    many.add_argument("--rate", type=float, default=4.0, help="requests a second [4]")
    given, behind = sys.argv[1:], []
    if "--" in given:
        place = given.index("--")
        given, behind = given[:place], given[place + 1 :]
    options = parser.parse_args(given)
    if options.verb == "own":
        make = batches if options.offline else own
        return make(options.folder, options.runs, behind)
    if options.verb == "fleet":
        spec = fleet_runs.FleetSpec(options.requests, options.rate, options.engines, options.router)
        kinds = [options.kind] if options.kind else list(fleet_runs.KINDS_OF_FLEET)
        return fleets(options.folder, options.runs, kinds, spec, behind)
    if options.verb == "published":
        return published()
    return vllm(options.case, options.fit, options.svg)


if __name__ == "__main__":
    sys.exit(main())
