"""The process that talks to Ray: `python -m octavo.fleet.providers.ray_process`, started by RayProvider.

Owns: connecting to a cluster or starting a local Ray; one named actor a replica; the report on Ray's open ports. Is the
only module that imports ray.
Does not: watch replicas, carry requests or tokens of text, or touch actors of other names.
Invariants: a local Ray listens on loopback only, needs a token of its own, and ends with this process. Actors of a
cluster are detached: they outlive a front, and the next front of the same fleet finds them by name.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from octavo.fleet.providers.ray import LOCAL, Address, Answer, Connect, Notice, Order, Remove, Start, Stop
from octavo.fleet.providers.ray_agent import AgentRunner, AgentState, Placement, ReplicaSpec

try:
    import ray
    from ray.util import list_named_actors
except ModuleNotFoundError:
    ray = None

NOT_INSTALLED = "ray is not installed: pip install 'octavo[ray]'"
CALL_S = 15.0  # a call of an actor that runs
NOTICE_S = 10.0  # without room for so long, a replica's needs are reported
STORE_BYTES = 80_000_000  # of a local Ray's object store, which stays empty; Ray takes no less than 75 MB
MAX_ORDERS = 32
_AGENT_STATE = msgspec.json.Decoder(AgentState)  # made here: the first use of a Struct is not safe for threads


class PlacementError(Exception):
    """A replica cannot be placed, or its agent failed. The message is for the operator."""


class RayFleet:
    """The actors of one fleet in a cluster. Every method may block, and may be called from any thread."""

    def __init__(self, connect: Connect, output: BinaryIO) -> None:
        self._name = f"octavo-{connect.fleet}"
        self._address = connect.address
        self._wait_s = connect.wait_s
        self._output = output
        self._lock = threading.Lock()
        self._folder = connect.folder

    def send(self, message: Answer | Notice) -> None:
        """Send one message to the api process."""
        with self._lock:
            self._output.write(msgspec.json.encode(message) + b"\n")
            self._output.flush()

    def connect(self) -> Placement:
        """Connect, or start a local Ray; report who can reach it. Raises PlacementError with the remedy."""
        if ray is None:
            raise PlacementError(NOT_INSTALLED)
        if self._address.startswith("ray://"):
            raise PlacementError(
                f"--ray {self._address}: Ray's client protocol is not used; run `ray start --address=HOST:6379 "
                "--num-cpus=0` on this machine, then give --ray HOST:6379"
            )
        try:
            context = self._start_local() if self._address == LOCAL else self._join()
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            text = " ".join(str(error).split())
            raise PlacementError(
                f"Ray at {self._address} cannot be used: {text}; its nodes need the same Ray "
                f"({ray.__version__}) and Python, and this machine must be one of them (ray start --address=HOST:6379)"
            ) from None
        for line in describe_exposure(context.address_info, ray.nodes(), os.environ):
            self.send(Notice(line))
        return Placement(_node_address(), "")

    def _join(self) -> Any:
        return ray.init(
            self._address,
            namespace=self._name,
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
        )

    def _start_local(self) -> Any:
        return ray.init(
            LOCAL,
            namespace=self._name,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
            object_store_memory=STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=self._folder,
        )

    def close(self) -> None:
        """Disconnect; end a local Ray."""
        if ray is not None:
            ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, replica: int, spec: ReplicaSpec) -> Placement:
        """Place a replica, or keep the one that runs with this spec."""
        encoded = msgspec.json.encode(spec)
        actor = self._find(replica)
        if actor is not None:
            if self._spec_of(actor) == encoded:
                return self.address(replica)
            self.stop(replica)
        needs = needs_of(spec)
        # One actor is on one machine, so all ranks of a replica are: no placement group is needed to pack them.
        actor_class = ray.remote(AgentRunner).options(
            name=self._name_of(replica),
            lifetime="detached",
            max_restarts=-1,
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
        )
        actor = actor_class.remote(encoded)
        try:
            self._wait_until_placed(replica, spec, actor)
        except PlacementError:
            ray.kill(actor)
            raise
        return self.address(replica)

    def _wait_until_placed(self, replica: int, spec: ReplicaSpec, actor: Any) -> None:
        """Wait until the actor runs; report what it needs after NOTICE_S."""
        placed = actor.spec.remote()
        began_at, is_reported = time.monotonic(), False
        while not ray.wait([placed], timeout=1.0)[0]:
            waited_s = time.monotonic() - began_at
            if waited_s > self._wait_s:
                raise PlacementError(f"{describe_lack(replica, spec)}; no room within {self._wait_s:g} s")
            if waited_s > NOTICE_S and not is_reported:
                is_reported = True
                self.send(Notice(f"Ray: {describe_lack(replica, spec)}; waiting up to {self._wait_s:g} s"))
        try:
            ray.get(placed)
        except ray.exceptions.RayError as error:
            raise PlacementError(f"replica {replica} could not be started by Ray: {_first_line(error)}") from None

    def address(self, replica: int) -> Placement:
        """Return where a replica runs. Raises PlacementError, also if its agent failed for good."""
        actor = self._find(replica)
        if actor is None:
            raise PlacementError(f"replica {replica} is not placed")
        try:
            host = ray.get(actor.__ray_call__.remote(_node_address), timeout=CALL_S)
            state = _AGENT_STATE.decode(ray.get(actor.state.remote(), timeout=CALL_S))
        except ray.exceptions.RayError as error:
            raise PlacementError(f"replica {replica} does not answer Ray: {_first_line(error)}") from None
        if state.failure:
            raise PlacementError(f"replica {replica} at {host}: {state.failure}")
        return Placement(host, state.name)

    def stop(self, replica: int) -> None:
        """End a replica and free its room; do nothing if there is none."""
        actor = self._find(replica)
        if actor is not None:
            self._remove(actor)

    def remove_all(self) -> None:
        """End all replicas of this fleet, those of earlier fronts too."""
        prefix = self._name + "-"
        replicas = [name.removeprefix(prefix) for name in list_named_actors() if name.startswith(prefix)]
        with ThreadPoolExecutor(MAX_ORDERS) as pool:
            list(pool.map(self.stop, [int(replica) for replica in replicas if replica.isdigit()]))

    def _remove(self, actor: Any) -> None:
        with suppress(ray.exceptions.RayError):  # it has no room yet, or its node is lost: then killing it is enough
            ray.get(actor.stop.remote(), timeout=CALL_S)
        ray.kill(actor)

    def _find(self, replica: int) -> Any:
        try:
            return ray.get_actor(self._name_of(replica))
        except ValueError:
            return None

    def _name_of(self, replica: int) -> str:
        return f"{self._name}-{replica}"

    def _spec_of(self, actor: Any) -> bytes | None:
        try:
            return bytes(ray.get(actor.spec.remote(), timeout=CALL_S))
        except ray.exceptions.RayError:
            return None


def _node_address(_runner: object = None) -> str:
    return str(ray.util.get_node_ip_address())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def needs_of(spec: ReplicaSpec) -> dict[str, float]:
    """Return the resources of all ranks of a replica."""
    num_gpus = spec.num_gpus
    if num_gpus is None:
        num_gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
    return {"CPU": spec.num_cpus * spec.num_ranks, "GPU": num_gpus * spec.num_ranks}


def describe_lack(replica: int, spec: ReplicaSpec) -> str:
    """Return what a replica needs and what the cluster has."""
    needs = needs_of(spec)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in needs}
    free = ray.available_resources()

    def listed(amounts: Mapping[str, float]) -> str:
        return " and ".join(f"{amounts.get(name, 0.0):g} {name}" for name in needs)

    return (
        f"replica {replica} needs {listed(needs)} on one machine; the cluster has {len(nodes)} machines, the most on "
        f"one are {listed(largest)}, free on all are {listed(free)}"
    )


def describe_exposure(info: Mapping[str, Any], nodes: list[Mapping[str, Any]], environ: Mapping[str, str]) -> list[str]:
    """Return the lines that name Ray's open ports and what makes them safe."""
    alive = [node for node in nodes if node["Alive"]]
    addresses = sorted({str(node["NodeManagerAddress"]) for node in alive})
    version = f"Ray {ray.__version__}"
    if all(address in ("127.0.0.1", "::1") for address in addresses):
        return [f"{version} on this machine, listening on loopback only, with a token of its own"]
    has_token = environ.get("RAY_AUTH_MODE", "").lower() == "token"
    has_tls = environ.get("RAY_USE_TLS", "0") not in ("", "0")
    ports = [f"GCS {str(info.get('gcs_address', '')).rpartition(':')[2]}"]
    for title, key in (("node managers", "NodeManagerPort"), ("object managers", "ObjectManagerPort")):
        ports.append(f"{title} {', '.join(sorted({str(node[key]) for node in alive}))}")
    ports += ["workers (one each, by default 10002 to 19999)", "client server 10001 if ray[client] is installed"]
    if info.get("webui_url"):
        ports.append(f"dashboard {info['webui_url']}")
    lines = [f"{version}, {len(addresses)} machines ({', '.join(addresses)}). Its open ports: {'; '.join(ports)}"]
    if not has_token:
        lines.append(
            "WARNING: this Ray takes orders without a token: a program that reaches these ports can run code on every "
            "machine. Open them between the cluster's machines only, and start Ray with RAY_AUTH_MODE=token on each "
            "(ray get-auth-token --generate)"
        )
    if not has_tls:
        lines.append(
            "Ray's own calls are not encrypted (RAY_USE_TLS=1 with certificates does that). They place replicas only; "
            "requests and answers do not pass through Ray"
        )
    return lines


def _answer(fleet: RayFleet, order: Order) -> None:
    """Carry out one order and answer it: a shell, for Ray raises errors of many kinds."""
    placement, error = None, ""
    try:
        match order:
            case Connect():
                placement = fleet.connect()
            case Start():
                placement = fleet.start(order.replica, order.spec)
            case Address():
                placement = fleet.address(order.replica)
            case Stop():
                fleet.stop(order.replica)
            case Remove():
                fleet.remove_all()
    except PlacementError as refusal:
        error = str(refusal)
    except Exception as other:  # the shell: Ray raises errors of many kinds, and the front needs an answer
        error = f"Ray: {type(other).__name__}: {_first_line(other)}"
    fleet.send(Answer(order.number, placement, error))


def main() -> None:
    """Carry out orders from stdin until it ends; what Ray prints goes to stderr."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders = msgspec.json.Decoder(Order)
    first = sys.stdin.buffer.readline()
    if not first:
        return
    connect = orders.decode(first)
    assert isinstance(connect, Connect)
    fleet = RayFleet(connect, output)
    _answer(fleet, connect)
    pool = ThreadPoolExecutor(MAX_ORDERS)
    for line in sys.stdin.buffer:
        pool.submit(_answer, fleet, orders.decode(line))
    fleet.close()
    os._exit(0)  # orders that still wait for room have no reader


if __name__ == "__main__":
    main()
