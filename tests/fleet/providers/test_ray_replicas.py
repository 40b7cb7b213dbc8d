"""RayReplicas: the words of an agent; scaling and rolling over agents that join a real front."""

from __future__ import annotations

import os

import pytest

from octavo import cli
from octavo.cli.flags import Parser, resolve_args
from octavo.config import Config
from octavo.config.sources import config_from_keywords
from octavo.fleet.providers.ray_replicas import replica_spec


def parsed(words: tuple[str, ...]) -> Config:
    parser = Parser(prog="octavo serve")
    cli.load_command(words[0], parser)
    return resolve_args(parser.parse(words[1:])).config


def test_an_agents_words_give_the_fronts_engine_settings_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)
    values = {
        "max_num_seqs": 7,
        "enable_prefix_caching": False,
        "threads": 3,
        "tensor_parallel_size": 2,
        "device": "cpu",
    }
    front = config_from_keywords("smollm2", {**values, "port": 9000, "api_key": ("k" * 16,), "fleet_token": "t" * 32})
    spec = replica_spec(front, "10.0.0.5:8765", "t" * 32)
    theirs = parsed(spec.words)
    for name in ("model", "chat", "cache", "scheduling", "execution", "parallel", "speculation"):
        assert getattr(theirs, name) == getattr(front, name), name
    assert theirs.fleet.join == ("10.0.0.5:8765",)
    assert theirs.serving.port == 8000 and theirs.serving.api_key == ()
    assert spec.token == "t" * 32 and "t" * 32 not in " ".join(spec.words)
    assert (spec.num_cpus, spec.num_gpus, spec.num_ranks) == (3.0, 0.0, 2)


def test_a_gpu_is_needed_where_the_device_is_one_or_the_cluster_decides() -> None:
    assert replica_spec(config_from_keywords("smollm2", {"device": "cuda"}), "h:1").num_gpus == 1.0
    assert replica_spec(config_from_keywords("smollm2", {}), "h:1").num_gpus is None
