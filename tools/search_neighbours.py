"""Check the answer of `octavo simulate --search` by simulating its neighbours whole, without bounds or bisection.

Usage: python -m tools.search_neighbours FLAGS, which are those of `octavo simulate --search`.
A neighbour is a candidate that differs from the answer in one setting. Each is simulated to the end of the workload
with every number of replicas that costs no more than the answer, and the answer itself with every number up to one
more. The exit status is 1 if a neighbour reaches the objectives and is cheaper, or as cheap with a wider margin, or if
the answer's settings reach them with other numbers than the answer's and one more. With --jobs N, so many processes
simulate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial

from octavo.cli import load_command
from octavo.cli.flags import Parser
from octavo.cli.search import prepare_search
from octavo.cli.simulate import workload_of
from octavo.simulator.goals import Verdict
from octavo.simulator.search import (
    Candidate,
    CapacitySearch,
    SearchResult,
    SearchTrial,
    count_replicas,
    process_pool,
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Search, simulate the neighbours, and print a line for each."""
    parser = Parser(prog="octavo simulate")
    load_command("simulate", parser)
    args = parser.parse(["--search", *words])
    search, _, _ = prepare_search(args, partial(workload_of, args))
    begin = time.monotonic()
    result = search.run()
    best = result.best
    print(f"search: {len(result.trials)} simulations, {time.monotonic() - begin:.0f} s in {search.jobs} processes")
    if best is None:
        print("no fleet reaches the objectives: there is no answer to check")
        return 1
    print(
        f"answer: {count_replicas(best.replicas)} ({best.candidate.label}), cost {result.cost:g}: {best.verdict.text}"
    )
    begin = time.monotonic()
    others = [one for one in search.candidates if one is not best.candidate and _num_changes(one, best.candidate) == 1]
    most = {one.label: int(result.cost / result.cost_of(one) + 1e-9) for one in others}
    most = {best.candidate.label: best.replicas + 1, **most}
    verdicts = _judge_whole(search, most)
    own, *rest = verdicts.values()
    is_right = [number for number, verdict in own.items() if verdict.is_reached] == [best.replicas, best.replicas + 1]
    print(f"the answer's settings: {_describe(own)}: {'confirmed' if is_right else 'REFUTED'}")
    for candidate, found in zip(others, rest, strict=True):
        is_worse = _is_worse(result, best, candidate, found)
        is_right = is_right and is_worse
        print(f"{candidate.label}: {_describe(found)}: {'confirmed' if is_worse else 'REFUTED'}")
    print(
        f"{len(others)} neighbours, {sum(most.values())} simulations, {time.monotonic() - begin:.0f} s in "
        f"{search.jobs} processes"
    )
    return 0 if is_right else 1


def _num_changes(one: Candidate, other: Candidate) -> int:
    return sum(one.chosen[name] != other.chosen[name] for name in one.chosen)


def _judge_whole(search: CapacitySearch, most: dict[str, int]) -> dict[str, dict[int, Verdict]]:
    """Return the verdicts on whole runs, by label and replicas: of 1 to `most` replicas of each label."""
    numbers = {one.label: number for number, one in enumerate(search.candidates)}
    with process_pool(search.jobs) as pool:
        running = {
            label: {
                count: pool.submit(search.judge, numbers[label], count, is_whole=True) for count in range(1, end + 1)
            }
            for label, end in most.items()
        }
        return {label: {count: one.result() for count, one in counts.items()} for label, counts in running.items()}


def _is_worse(result: SearchResult, best: SearchTrial, candidate: Candidate, verdicts: dict[int, Verdict]) -> bool:
    """Return True if no fleet of the candidate that reaches the objectives is better than the answer."""
    for replicas, verdict in verdicts.items():
        is_cheaper = result.cost_of(candidate, replicas) < result.cost * (1 - 1e-9)
        if verdict.is_reached and (is_cheaper or verdict.margin > best.verdict.margin):
            return False
    return True


def _describe(verdicts: dict[int, Verdict]) -> str:
    if not verdicts:
        return "one replica costs more"
    reached = [number for number, verdict in verdicts.items() if verdict.is_reached]
    most = max(verdicts)
    result = f"{' and '.join(map(str, reached))} reach them" if reached else "none reaches them"
    return f"1 to {most} replicas, {result}; {most}: {verdicts[most].text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
