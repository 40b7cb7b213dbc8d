"""Row 32: a node is killed, its link is cut, or one direction of it is lost, and the others go on.

Three network namespaces on a bridge have a node each; the front is outside of them. Needs root and ip(8).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.core.request import FinishReason
from octavo.fleet.security import HostPort
from tests.engine.fakes import expected, make_request
from tests.fleet.agents import AgentProcess
from tests.fleet.fronts import TOKEN, Front, open_front, until
from tests.reliability.deaths import Load
from tests.reliability.scorecard import Score

IS_ABLE = os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = pytest.mark.skipif(not IS_ABLE, reason="needs root and ip(8) for network namespaces")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Nodes:
    """Namespaces with an address each, on a bridge with the front's address."""

    def __init__(self, count: int) -> None:
        tag = f"{os.getpid() % 46656:x}"
        self.bridge, net = f"ocb{tag}", f"10.{199 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.front = f"{net}.1"
        self.names = [f"oc{tag}n{number}" for number in range(count)]
        self._net = net

    def make(self) -> None:
        """Make the bridge and the namespaces."""
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.front}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}v", "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"{self._net}.{number + 2}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove what exists."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def cut(self, number: int) -> None:
        """Cut a node's link: nothing arrives on either side, and neither is informed."""
        ip("link", "set", f"{self.names[number]}v", "nomaster")

    def join(self, number: int) -> None:
        """Undo cut()."""
        ip("link", "set", f"{self.names[number]}v", "master", self.bridge)

    def mute(self, number: int) -> None:
        """Lose what a node sends; what is sent to it arrives."""
        ip("-n", self.names[number], "route", "add", "blackhole", f"{self.front}/32")

    def unmute(self, number: int) -> None:
        """Undo mute()."""
        ip("-n", self.names[number], "route", "del", "blackhole", f"{self.front}/32")


@contextmanager
def open_nodes(count: int) -> Iterator[Nodes]:
    nodes = Nodes(count)
    try:
        nodes.make()
    except subprocess.CalledProcessError as error:
        nodes.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        yield nodes
    finally:
        nodes.remove()


async def lose(front: Front, begin: Callable[[], None], undo: Callable[[], None], moments: list[float]) -> float:
    """Apply a fault until an engine is lost, undo it, and wait until all serve; return the seconds to notice it."""
    num_engines = front.engines.num_engines
    moments.append(time.monotonic())
    begin()
    await until(lambda: front.engines.num_engines < num_engines)
    noticed_s = time.monotonic() - moments[-1]
    undo()
    await until(lambda: front.engines.num_engines == num_engines)
    return noticed_s


async def test_row_32_links_are_cut_and_the_others_go_on(score: Score, tmp_path: Path) -> None:
    num_requests, rounds = score.dose((150, 1), (500, 3))
    with open_nodes(3) as nodes:
        async with open_front(tmp_path, address=HostPort(nodes.front, 0)) as front:
            started = [
                AgentProcess(TOKEN, [front.address], prefix=("ip", "netns", "exec", name)) for name in nodes.names
            ]
            try:
                await until(lambda: front.engines.num_engines == 3)
                await go_on(score, front, nodes, started, (num_requests, rounds))
            finally:
                for agent in started:
                    agent.kill()


async def go_on(score: Score, front: Front, nodes: Nodes, started: list[AgentProcess], dose: tuple[int, int]) -> None:
    num_requests, rounds = dose
    load = Load(front.supervisor, lambda number: make_request(f"r{number}", max_tokens=100), 24)
    await until(lambda: len(load.streams) > 24)
    moments: list[float] = []
    noticed: dict[str, list[float]] = {"a link is cut": [], "one direction is lost": [], "a node is killed": []}

    def start_again() -> None:
        started[2] = AgentProcess(TOKEN, [front.address], prefix=("ip", "netns", "exec", nodes.names[2]))

    for _ in range(rounds):
        noticed["a link is cut"].append(await lose(front, lambda: nodes.cut(0), lambda: nodes.join(0), moments))
        noticed["one direction is lost"].append(
            await lose(front, lambda: nodes.mute(1), lambda: nodes.unmute(1), moments)
        )
        noticed["a node is killed"].append(await lose(front, lambda: started[2].kill(), start_again, moments))
    await until(lambda: len(load.streams) >= num_requests)
    await load.stop()
    report = front.supervisor.report()
    lost = len(load.errors) + sum(stream.reason is not FinishReason.LENGTH for stream in load.streams)
    score.tell("requests, resumed", f"{len(load.streams)}, {report['resumed_requests']}")
    score.count("lost", lost)
    score.count("outputs at a wrong position", sum(stream.num_misplaced for stream in load.streams))
    equal = sum(stream.ids == expected(stream.request) for stream in load.streams)
    score.share("byte-equal to the run without a fault", equal, len(load.streams))
    for what, times in noticed.items():
        score.time(f"seconds until it is noticed that {what}", max(times), 3.0)
    gaps = sorted(gap for at in moments for stream in load.streams if (gap := stream.longest_gap(at)) is not None)
    score.tell("gaps over a fault", len(gaps))
    score.time("gap p99 s", gaps[int(0.99 * len(gaps))], 3.0)
    score.tell("dropped ids", report["dropped_ids"])
