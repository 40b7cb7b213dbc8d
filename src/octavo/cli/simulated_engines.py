"""The engines of `octavo simulate`: their flags, and the groups of replicas that the flags describe.

Owns: the flags of models, devices, parallel sizes and fleets; the form of --group; each group's engine, cost model,
price and Limits; the Setup of each policy. Does not: simulate, or print anything.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.cli.flags import UsageError, settings_given, whole
from octavo.config import SETTINGS, Config
from octavo.config.setting import Number
from octavo.config.sources import Resolved, load
from octavo.core.limits import Limits
from octavo.engine.limits import read_tenant_weights
from octavo.fleet.routing import ROUTERS
from octavo.simulator.cost_model import CostModel
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.fitted import Fitted
from octavo.simulator.costs.hardware import THIS, device_facts
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.kv_transfer import LINKS, KVLink, read_link
from octavo.simulator.network_hop import read_hop
from octavo.simulator.scaling import ScalingRule
from octavo.simulator.setup import ReplicaFailure, ReplicaGroup, ReplicaSetup, Role, Setup, SimulatedEngine
from octavo.simulator.workloads.spec import Spec, read_number

DEFAULT_MODEL, DEFAULT_DEVICE = "llama-3.1-8b", "h100"
MAX_POLICIES = 16
MAX_GROUPS = 16
MAX_DRAFTS = 7  # of a sequence in a step, as --speculate-max-tokens
RARE = (
    "--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size", "--enable-expert-parallel",
    "--price", "--depth", "--max-waiting", "--fail", "--autoscale", "--kv-link", "--hop", "--draft-acceptance",
    "--draft-cost", "--tenant-weight",
)  # fmt: skip
# Fields that describe a machine -> their flags.
MACHINE_FLAGS = {
    "device": "device", "tensor_parallel_size": "tp", "data_parallel_size": "dp", "pipeline_parallel_size": "pp",
    "enable_expert_parallel": "ep",
}  # fmt: skip
_PRICE = Number(float, 0)
_SIZES = {"tp": "tensor_parallel_size", "dp": "data_parallel_size", "pp": "pipeline_parallel_size"}
_GROUP_SETTINGS = tuple(
    setting for setting in SETTINGS if setting.section in ("scheduling", "cache") and setting.name != "policy"
)


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of engines and fleets."""
    group.add_argument("--model", metavar="M", help="a shape known by name, or a model [llama-3.1-8b]")
    group.add_argument("--max-model-len", type=whole, metavar="N", help="longest prompt + output [the model's]")
    group.add_argument("--device", metavar="D", help="a device by name, or this [h100]")
    _add_parallel_arguments(group)
    group.add_argument(
        "--cost", default="roofline", metavar="C", help="roofline, table:DIR or fitted:FILE; *FILE.json corrects it"
    )
    group.add_argument(
        "--price", metavar="X", help="dollars an hour of one device, or D=X,D=X of several [their usual rents]"
    )
    group.add_argument("--depth", type=whole, metavar="N", help="plans in flight, 1 or 2 [1]")
    group.add_argument("--replicas", metavar="N", help="engines behind a router; MIN-MAX if they are scaled [1]")
    group.add_argument(
        "--autoscale", metavar="RULE", help="requests:N open requests per replica, or kv:SHARE, start_s=60, ..."
    )
    group.add_argument(
        "--group", action="append", default=[], metavar="G",
        help="replicas of a device, as in h100:replicas=4,tp=2; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--kv-link", metavar="L",
        help="between groups with role=prefill and role=decode: ib-ndr, ..., or bandwidth=50e9,latency=20us",
    )  # fmt: skip
    group.add_argument(
        "--hop", metavar="H", help="between router and engines, each way: latency=0.3ms,spread=0.1ms [none]"
    )
    group.add_argument(
        "--router", default="round_robin", choices=tuple(ROUTERS), help="how replicas are chosen [round_robin]"
    )
    group.add_argument("--max-waiting", type=whole, default=0, metavar="N", help="most waiting requests; 0 = no bound")
    group.add_argument(
        "--fail", action="append", default=[], metavar="R@T+S", help="replica R fails at T s, back S s later"
    )
    _add_draft_arguments(group)
    group.add_argument(
        "--tenant-weight", action="append", default=[], metavar="T=W", help="a tenant's share under fair"
    )


def _add_parallel_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel-size", "--tp", dest="tp", type=Number(int, 1, 64), default=1, metavar="N",
        help="devices over which each layer is split [1]",
    )  # fmt: skip
    group.add_argument(
        "--data-parallel-size", "--dp", dest="dp", type=Number(int, 1, 1024), default=1, metavar="N",
        help="engines of one replica; with a model of experts they step together [1]",
    )  # fmt: skip
    group.add_argument(
        "--pipeline-parallel-size", "--pp", dest="pp", type=Number(int, 1, 256), default=1, metavar="N",
        help="stages into which the layers are divided [1]",
    )  # fmt: skip
    group.add_argument(
        "--enable-expert-parallel", "--ep", dest="ep", action="store_true",
        help="whole experts on each device, instead of a slice of every expert",
    )  # fmt: skip


def _add_draft_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--draft-acceptance", type=Number(float, 0), metavar="A", help="a draft model; a share A of drafts is accepted"
    )
    group.add_argument(
        "--draft-cost", type=Number(float, 0), default=0.25, metavar="C", help="a drafting pass, in steps [0.25]"
    )


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A group of equal replicas: its engine, and one Limits for each policy. `price` is dollars per engine and hour.

    A fleet that is not described by --group is one group without a name.
    """

    name: str
    replicas: int
    max_replicas: int
    scaling: ScalingRule | None
    role: Role
    engine: SimulatedEngine
    costs: CostModel
    limits: list[Limits]
    price: float

    def at(self, policy: int) -> ReplicaGroup:
        """Return the group with the policy of this number."""
        engine = self.engine
        devices = 1 if engine.hardware is None else engine.hardware.kv_devices
        replica = ReplicaSetup(self.limits[policy], self.costs, engine.ranks, engine.pipeline, devices)
        return ReplicaGroup(self.name, replica, self.replicas, self.scaling, self.max_replicas, self.role)

    @property
    def count(self) -> str:
        """Return the number of replicas as text."""
        return f"{self.replicas}" if self.scaling is None else f"{self.replicas} to {self.max_replicas}"


def make_groups(args: argparse.Namespace, resolved: Resolved) -> list[SimulatedGroup]:
    """Return the groups that the flags describe, at least one. Raises ConfigError."""
    if not args.group:
        return [_make_group(args, resolved, "")]
    if len(args.group) > MAX_GROUPS:
        raise UsageError(f"--group is given {len(args.group)} times; give at most {MAX_GROUPS}")
    for name in ("device", "replicas"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is of a fleet of one device, and each --group has its own; leave it out")
    groups = [_read_group(args, text) for text in args.group]
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--group has {name} twice; give each a name, as in {name}:name=small,replicas=2")
    return groups


def make_setups(args: argparse.Namespace, groups: Sequence[SimulatedGroup]) -> list[Setup]:
    """Return the Setup for each policy."""
    first, has_groups = groups[0], bool(args.group) or groups[0].scaling is not None
    if args.autoscale and all(group.scaling is None for group in groups):
        raise UsageError(
            "--autoscale needs a range of replicas; give --replicas MIN-MAX, or replicas=MIN-MAX in --group"
        )
    hardware, link = first.engine.hardware, _read_link(args, groups)
    drafts = None if args.draft_acceptance is None else DraftSettings(args.draft_acceptance, args.draft_cost)
    return [
        Setup(
            limits, first.costs, first.engine.depth if args.depth is None else args.depth,
            1 if has_groups else first.replicas, args.router,
            failures=tuple(map(_read_failure, args.fail)), max_waiting=args.max_waiting,
            fast_forward=args.fast_forward, sample_s=1.0, seed=args.seed, drafts=drafts,
            ranks=first.engine.ranks, pipeline=first.engine.pipeline,
            groups=tuple(group.at(number) for group in groups) if has_groups else (),
            hop=read_hop(args.hop) if args.hop else None, link=link,
            kv_token_bytes=0.0 if hardware is None else hardware.model.kv_bytes_per_token,
        )
        for number, limits in enumerate(first.limits)
    ]  # fmt: skip


def describe_groups(groups: Sequence[SimulatedGroup]) -> dict[str, str]:
    """Return a description of the engines for a report: what all groups have in common, then each group."""
    described = [group.engine.describe(group.limits[0]) | {"cost model": group.costs.name} for group in groups]
    if len(groups) == 1 and not groups[0].name:
        return described[0]
    common = {name: text for name, text in described[0].items() if all(one.get(name) == text for one in described)}
    for group, one in zip(groups, described, strict=True):
        own = [f"{name} {text}" for name, text in one.items() if name not in (*common, "device")]
        own += [f"role {group.role.name.lower()}"] if group.role else []
        own += [f"${group.price:g} an hour each"] if group.price else []
        common[f"group {group.name}"] = ", ".join([f"{group.count} x {one['device']}", *own])
    return common


def _read_group(args: argparse.Namespace, text: str) -> SimulatedGroup:
    """Read `DEVICE:option=value,...`; options that it leaves out have the values of the flags."""
    spec, own = Spec(text, "--group"), argparse.Namespace(**vars(args))
    spec.options = {name.replace("-", "_"): value for name, value in spec.options.items()}
    own.device, own.group = spec.kind, []
    own.replicas = spec.text_of("replicas", "1")
    name = spec.text_of("name", spec.kind)
    for short, long in _SIZES.items():
        size = spec.count(long, getattr(args, short), min_value=1)
        setattr(own, short, spec.count(short, size, min_value=1))
    names = ("ep", "enable_expert_parallel")
    own.ep = args.ep or any(spec.choice(name, ("no", "yes")) == "yes" for name in names)
    own.cost = spec.text_of("cost", args.cost)
    price = spec.number("price", -1.0, min_value=0)
    own.price = args.price if price < 0 else f"{price}"
    own.max_model_len = spec.count("max_model_len", args.max_model_len or 0, min_value=1) or None
    given = settings_given(args)
    for setting in _GROUP_SETTINGS:
        for key in dict.fromkeys((setting.name, *(key.replace("-", "_") for key in setting.keys))):
            value = spec.text_of(key)
            if key in spec.options:
                given[setting.name] = setting.read(value, f"--group {text!r}: {key}")
    role = Role[spec.choice("role", ("whole", "prefill", "decode")).upper()]
    spec.close()
    if spec.path or not spec.kind:
        raise UsageError(f"--group is {text!r}; give DEVICE:option=value,..., as in h100:replicas=4,tp=2")
    return _make_group(own, load(given, os.environ, args.config), name, role)


def _read_link(args: argparse.Namespace, groups: Sequence[SimulatedGroup]) -> KVLink | None:
    """Return the link between prefill and decode replicas; None without them."""
    has_roles = any(group.role for group in groups)
    if args.kv_link and not has_roles:
        raise UsageError(
            "--kv-link is between prefill and decode replicas; give role=prefill and role=decode in --group"
        )
    if has_roles and not args.kv_link:
        raise UsageError(f"--group has a role, and the KV needs a link; give --kv-link one of {', '.join(LINKS)}")
    if has_roles and any(group.engine.hardware is None for group in groups):
        raise UsageError("--kv-link carries the KV of a model, which the fit does not know; give --model and --device")
    return read_link(args.kv_link) if args.kv_link else None


def _make_group(args: argparse.Namespace, resolved: Resolved, name: str, role: Role = Role.WHOLE) -> SimulatedGroup:
    engine, costs = _engine(args, resolved.config)
    apart = args.dp // engine.ranks  # data-parallel engines of a dense model share nothing
    least, most = _read_replicas(args.replicas or "1")
    scaling = None if most is None else _read_rule(args.autoscale or "requests:16")
    given = None if args.price is None else _read_price(args.price, engine)
    price = engine.price if given is None else given * args.tp
    if scaling is not None and apart > 1:
        raise UsageError(
            f"--data-parallel-size is {args.dp}, and engines of {engine.model} share nothing; leave it out with a "
            "range of replicas"
        )
    limits = limits_of(args, resolved, engine)
    return SimulatedGroup(name, least * apart, most or 0, scaling, role, engine, costs, limits, price)


def _read_replicas(text: str) -> tuple[int, int | None]:
    """Read `N`, or `MIN-MAX`."""
    least, dash, most = text.partition("-")
    if least.isdecimal() and len(text) < 12 and (most.isdecimal() if dash else True):
        return int(least), int(most) if dash else None
    raise UsageError(f"replicas is {text!r}; give a whole number, or a range such as 1-8")


def _read_rule(text: str) -> ScalingRule:
    """Read `requests:16,start_s=60,...` or `kv:0.7,...`."""
    spec, rule = Spec(text, "--autoscale"), ScalingRule()
    target = read_number(spec.path)
    if target is None:
        raise UsageError(
            f"--autoscale is {text!r}; give requests:N or kv:SHARE, as in requests:16,start_s=60,down_s=120"
        )
    times = {
        name: spec.number(name, getattr(rule, name), min_value=0)
        for name in ("every_s", "start_s", "up_s", "down_s", "tolerance")
    }
    spec.close()
    return ScalingRule(spec.kind, target, **times)


def _read_price(text: str, engine: SimulatedEngine) -> float | None:
    """Return the price of an engine's device from `X`, or from `DEVICE=X,DEVICE=X`; None if it is not named there."""
    device = engine.device if engine.hardware is None else engine.hardware.device.name
    found = None
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        if not _PRICE.accepts(number):
            raise UsageError(f"--price is {part}; give {_PRICE}, or DEVICE=NUMBER,... for several devices")
        name = name.strip().lower()
        if name in ("", device) or (name != THIS and device_facts(name).name == device):
            found = float(_PRICE(number))
    return found


def _engine(args: argparse.Namespace, config: Config) -> tuple[SimulatedEngine, CostModel]:
    """Return the engine and its cost model. With `fitted:`, the recorded engine is the default."""
    if args.cost.startswith("fitted:") and args.model is None and args.device is None:
        costs = cost_model(args.cost)
        fit = costs.fit if isinstance(costs, Fitted) else None
        if fit is not None and fit.limits is not None:
            model, device, depth = (fit.engine.get(name) for name in ("model", "device", "depth"))
            depth = depth if isinstance(depth, int) else 1
            return SimulatedEngine(f"{model}", f"{device}", depth, 0.0, recorded=fit.limits), costs
        raise UsageError(f"--cost {args.cost} does not say whose engine it is; give --model and --device")
    names = args.model or DEFAULT_MODEL, args.device or DEFAULT_DEVICE
    hardware = Hardware.of(*names, args.tp, config.cache.block_size)
    dp = args.dp if hardware.model.num_experts else 1
    hardware = replace(hardware, dp=dp, pp=args.pp, is_expert_parallel=args.ep)
    engine = SimulatedEngine.of_hardware(hardware)
    if args.cost.startswith("fitted:") and (engine.ranks > 1 or args.pp > 1):
        raise UsageError(
            f"--cost is {args.cost}, which knows steps of one engine; leave out --data-parallel-size and "
            "--pipeline-parallel-size, or give roofline or table:DIR"
        )
    return engine, cost_model(args.cost, hardware)


def limits_of(args: argparse.Namespace, resolved: Resolved, engine: SimulatedEngine) -> list[Limits]:
    """Return the Limits for each policy."""
    scheduling = resolved.config.scheduling
    given = {name for name, origin in resolved.origins.items() if origin != "default"}
    if "policy" not in given and engine.recorded is not None:
        scheduling = replace(scheduling, policy=engine.recorded.policy)
    names = [name.strip() for name in scheduling.policy.split(",")]
    if len(names) > MAX_POLICIES or len(names) != len({*names}):
        raise UsageError(f"--policy is {scheduling.policy!r}; give each of at most {MAX_POLICIES} once")
    weights = read_tenant_weights(args.tenant_weight)
    limits = [
        engine.limits(replace(scheduling, policy=name), resolved.config.cache, given, args.max_model_len)
        for name in names
    ]
    if args.draft_acceptance is not None:
        limits = [replace(one, max_draft_tokens=MAX_DRAFTS, has_draft_model=True) for one in limits]
    return [replace(one, tenant_weights=weights) for one in limits] if weights else limits


def _read_failure(text: str) -> ReplicaFailure:
    replica, at, rest = text.partition("@")
    time_s, plus, restart_s = rest.partition("+")
    try:
        if at:
            return ReplicaFailure(int(replica), float(time_s), float(restart_s) if plus else None)
    except ValueError:
        pass
    raise UsageError(f"--fail is {text!r}; give REPLICA@SECONDS+SECONDS, as in 0@60+30, or without + for ever")
