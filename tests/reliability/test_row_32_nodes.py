"""Row 32: a node of a Ray cluster is lost while it serves: killed, cut off, or heard no more by the front.

Three network namespaces on a bridge of their own: the front and Ray's head, and two nodes with a replica each. The
front finds a lost replica by its own link; Ray's opinion of its nodes, which comes much later, has no effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.scorecard import Score
from tests.source_tree import ROOT

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
RAY = Path(sys.executable).with_name("ray")
NETWORK = "10.78.32"
SCRIPT = "step_ms: 20\nmax_model_len: 4096\nrules: []\n"


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done


def can_make_namespaces() -> bool:
    name = f"ocr32-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
    except (OSError, AssertionError):
        return False
    return True


class Cluster:
    """Three Ray nodes, `a` is the head. Names are unique to this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tag = f"o{os.getpid() % 100_000}"
        self.names = {node: f"{tag}{node}" for node in "sabc"}  # s: the switch
        self.environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "OCTAVO_RUN_DIR": str(folder / "run"),
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }

    def inside(self, node: str, *words: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[node], *words)

    def make_network(self) -> None:
        for name in self.names.values():
            run("ip", "netns", "add", name)
            run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        run(*self.inside("s", "ip", "link", "add", "br0", "type", "bridge"))
        run(*self.inside("s", "ip", "link", "set", "br0", "up"))
        for host, node in enumerate("abc", 1):
            inner, outer = f"{self.names[node]}i", f"{self.names[node]}o"
            run("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
            run("ip", "link", "set", inner, "netns", self.names[node])
            run("ip", "link", "set", outer, "netns", self.names["s"])
            run(*self.inside(node, "ip", "link", "set", inner, "name", "eth0"))
            run(*self.inside(node, "ip", "addr", "add", f"{NETWORK}.{host}/24", "dev", "eth0"))
            run(*self.inside(node, "ip", "link", "set", "eth0", "up"))
            run(*self.inside("s", "ip", "link", "set", outer, "master", "br0"))
            run(*self.inside("s", "ip", "link", "set", outer, "up"))

    def start_ray(self) -> None:
        common = ("--disable-usage-stats", "--object-store-memory=80000000")
        for host, node in enumerate("abc", 1):
            address = ("--head", "--port=6399", "--num-cpus=0", "--include-dashboard=false")
            address += (f"--temp-dir={self.folder / 'r'}",)
            if node != "a":
                address = (f"--address={NETWORK}.1:6399", "--num-cpus=1")
            words = (str(RAY), "start", *address, f"--node-ip-address={NETWORK}.{host}", *common)
            with (self.folder / f"{node}.log").open("wb") as log:  # Ray's processes keep it open
                done = subprocess.run(
                    self.inside(node, *words), env=self.environment, stdout=log, stderr=log, timeout=120
                )
            assert done.returncode == 0, (self.folder / f"{node}.log").read_text()

    def pids(self, node: str) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.names[node]], capture_output=True, text=True)
        return [int(word) for word in listed.stdout.split()]

    def remove(self) -> None:
        for node in "cba":
            deadline = time.monotonic() + 30
            while (pids := self.pids(node)) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def commands(self, fault: str) -> tuple[str, str]:
        """Shell commands that make the fault at node b, and that end it."""
        b, switch = self.names["b"], f"ip netns exec {self.names['s']} ip link set {self.names['b']}o"
        if fault == "a node is killed":
            return f"ip netns pids {b} | xargs -r kill -9", ""
        if fault == "a link is cut":
            return f"{switch} down", f"{switch} up"
        # What node b sends to the front goes to an address that no interface has; the front's frames still arrive.
        neighbour = f"ip netns exec {b} ip neigh"
        return (
            f"{neighbour} replace {NETWORK}.1 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
            f"{neighbour} del {NETWORK}.1 dev eth0",
        )


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0 or not can_make_namespaces():
        pytest.skip("network namespaces need root and ip netns")
    folder = Path(f"/tmp/octavo-row32-{os.getpid()}")  # short: Ray's sockets lie below it
    folder.mkdir()
    (folder / "script.yaml").write_text(SCRIPT)
    cluster = Cluster(folder)
    try:
        cluster.make_network()
        cluster.start_ray()
        yield cluster
    finally:
        cluster.remove()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["a node is killed", "a link is cut", "one direction is lost"])
def test_row_32_a_node_is_lost_and_no_request_with_it(score: Score, cluster: Cluster, fault: str) -> None:
    score.of(fault)
    make, heal = cluster.commands(fault)
    order = {
        "folder": str(cluster.folder),
        "host": f"{NETWORK}.1",
        "fault": make,
        "heal": heal,
        "requests": 500,
        "width": 32,
    }
    words = cluster.inside("a", sys.executable, str(Path(__file__).with_name("ray_front.py")))
    done = subprocess.run(
        words, input=json.dumps(order) + "\n", env=cluster.environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert any("Its open ports: GCS 6399" in notice for notice in figures["notices"]), figures["notices"]
    assert not any("WARNING" in notice for notice in figures["notices"]), "this Ray has a token"
    score.tell("requests, open at the fault, resumed", [figures[n] for n in ("requests", "open_at_fault", "resumed")])
    score.count("lost", figures["lost"])
    score.count("outputs at a wrong position", figures["misplaced"])
    score.share("byte-equal to the run without a fault", figures["equal"], figures["requests"])
    score.least("requests open at the fault", figures["open_at_fault"], 16)
    score.least("requests resumed", figures["resumed"], 8)
    score.time("gap p99 s", figures["gap_p99_s"], 3.0)
    score.tell("front notices after s", round(figures["noticed_s"], 2))
    if heal:
        score.tell("the replica is back, after the end of the fault, s", round(figures["rejoined_s"], 2))
