"""The plan of a fleet in a file: written and read back, and each wrong field named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import cli
from octavo.cli.flags import Parser, resolve_args
from octavo.errors import ConfigError
from octavo.fleet.plan import FleetPlan, read_fleet_plan
from octavo.fleet.routing import ROUTERS

PLAN = FleetPlan("smollm2", 3, "prefix_affinity", {"max_sequences": 64, "policy": "fair"}, "ttft_p99=1", "ttft_p99 0.3")


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@given(
    st.text(min_size=1, max_size=9), st.integers(1, 1024), st.sampled_from(sorted(ROUTERS)), st.integers(1, 99),
    st.booleans(),
)  # fmt: skip
def test_a_plan_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, model: str, replicas: int, router: str, count: int, is_on: bool
) -> None:
    settings = {"max_sequences": count, "enable_prefix_caching": is_on, "policy": "fcfs", "headroom": 0.25}
    plan = FleetPlan(model, replicas, router, settings, "ttft=1", "goodput 1", "poisson:rate=4")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert read_fleet_plan(write(path, {"plan": plan.facts(), "trials": []})) == plan


def test_settings_are_written_with_the_keys_of_a_config_file() -> None:
    assert PLAN.facts()["settings"] == {"max-num-seqs": 64, "policy": "fair"}


def test_sizes_of_ranks_are_read_and_counted() -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "enable_prefix_caching": False, "headroom": None}
    plan = FleetPlan("m", 2, "random", sizes, device="h100")
    assert plan.num_devices == 8 and plan.why_not_served() is None and PLAN.num_devices == 1
    assert plan.command() == (
        "octavo fleet --model=m --tensor-parallel-size=4 --pipeline-parallel-size=2 --no-enable-prefix-caching "
        "--replicas=2 --router=random"
    )
    parser = Parser(prog="octavo fleet")
    cli.load_command("fleet", parser)
    config = resolve_args(parser.parse(plan.command().split()[2:])).config
    assert config.parallel.num_ranks == 8 and config.fleet.replicas == 2 and not config.cache.enable_prefix_caching


def test_what_no_pod_or_engine_can_have_gets_no_values() -> None:
    wide = FleetPlan("m", 2, "random", {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, device="h100")
    with pytest.raises(ConfigError, match="a replica has 16 devices, and a machine seldom more than 8"):
        wide.kustomization()
    experts = FleetPlan("m", 2, "random", {"data_parallel_size": 2, "tensor_parallel_size": 2}, device="h100")
    assert experts.num_devices == 4 and experts.facts()["settings"]["data-parallel-size"] == 2
    with pytest.raises(ConfigError, match="no engine has data-parallel-size 2"):
        experts.kustomization()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 0}, "plan.replicas is 0; give a whole number from 1 to 1024"),
        ({"replicas": "3"}, "plan.replicas is '3'; give a whole number from 1 to 1024"),
        ({"replicas": True}, "plan.replicas is True; "),
        ({"replicas": None}, "plan.replicas is None; "),
        ({"model": ""}, "plan.model is ''; give a model's name"),
        ({"router": "prefix_afinity"}, "plan.router is 'prefix_afinity'; give one of round_robin, "),
        ({"version": 2}, "plan.version is 2; give 1, the version that this Octavo reads"),
        ({"objective": 4}, "plan.objective is 4; give a text"),
        ({"colour": "red"}, "unknown field of plan 'colour'"),
        ({"settings": {"max-num-seq": 4}}, "unknown setting 'max-num-seq'; did you mean 'max-num-seqs'?"),
        ({"settings": {"port": 80}}, "unknown setting 'port'"),
        ({"settings": {"model": "other"}}, "unknown setting 'model'"),
        ({"settings": {"max-num-seqs": "many"}}, "plan.settings.max-num-seqs is 'many'; give a whole number"),
        ({"settings": []}, "plan.settings is []; give an object"),
        ({"device": 4}, "plan.device is 4; give a text"),
        (
            {"settings": {"enable-expert-parallel": True}},
            "no engine has enable-expert-parallel True: experts are not divided among ranks; search without it",
        ),
        (
            {"settings": {"data-parallel-size": 2}},
            "no engine has data-parallel-size 2: octavo fleet --replicas N serves several engines",
        ),
        ({"settings": {"tensor-parallel-size": 0}}, "plan.settings.tensor-parallel-size is 0; give a whole number"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "plan.json", {"plan": PLAN.facts() | change})
    with pytest.raises(ConfigError) as caught:
        read_fleet_plan(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[1]", "has no plan"), ('{"trials": []}', "has no plan"), ('{"plan": 3}', "plan is 3"),
     ('{"plan": null}', "no fleet reached"), ('{"plan": {"model": "m", "replicas": 2}}', "plan.router is None"),
     ("[" * 100_000, "is not JSON")],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_fleet_plan(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        read_fleet_plan(tmp_path / "none.json")
