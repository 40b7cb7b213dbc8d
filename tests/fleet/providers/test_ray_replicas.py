"""RayReplicas: the words of an agent; scaling and rolling over agents that join a real front."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.fleet.fronts import TOKEN, open_front, until
from tests.reliability.deaths import follow
from tests.reliability.ray_front import NUM_PROMPTS, make_request

from octavo import cli
from octavo.cli.flags import Parser, resolve_args
from octavo.config import Config
from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason
from octavo.errors import ConfigError
from octavo.fleet.providers.ray import RayProvider
from octavo.fleet.providers.ray_replicas import RayReplicas, replica_spec
from octavo.fleet.security import parse_address


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


def test_replicas_dial_an_address_that_they_can_reach() -> None:
    provider = RayProvider("fleet", "10.0.0.5:6379", print, 1.0)
    for own, listening, dialled in (
        ("10.0.0.5", f"{'.'.join('0000')}:8765", "10.0.0.5:8765"),
        ("fd00::5", "[::]:8765", "[fd00::5]:8765"),
        ("10.0.0.5", "10.1.0.5:8765", "10.1.0.5:8765"),
        ("10.0.0.5", "gpu7:8765", "gpu7:8765"),
    ):
        provider.host = own
        assert str(provider.dial_address(parse_address(listening, "--fleet-address"))) == dialled
    with pytest.raises(
        ConfigError, match=r"'\[::\]:8765', which listens on IPv6 only, .* give 10.0.0.5:8765, or leave"
    ):
        provider.dial_address(parse_address("[::]:8765", "--fleet-address"))


@pytest.mark.timeout(300)
async def test_replicas_of_a_local_ray_serve_and_lose_nothing_when_an_actor_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    (tmp_path / "script.yaml").write_text("step_ms: 10\nrules: []\n")
    provider = await RayProvider.connect("test-replicas", "local", lambda line: None)
    try:
        async with open_front(tmp_path) as front:
            supervisor = front.supervisor
            config = config_from_keywords(f"scripted:{tmp_path / 'script.yaml'}", {"threads": 1})
            spec = replica_spec(config, str(front.address), TOKEN.decode())
            replicas = RayReplicas(supervisor, provider, msgspec.structs.replace(spec, num_cpus=0.1))
            await replicas.scale(2)
            assert front.engines.num_engines == 2 and replicas.numbers == [0, 1]
            work = asyncio.gather(*(follow(supervisor, make_request(number)) for number in range(100)))
            await until(lambda: len(supervisor.requests) > 50)

            names = {(await provider.address(number)).agent: number for number in replicas.numbers}
            victim = max(supervisor.replicas, key=lambda replica: len(replica.bound.requests if replica.bound else ()))
            agent = psutil.Process(int(victim.name.partition(":")[2]))
            actor = agent.parent()
            assert actor is not None and actor.cmdline()[0].startswith("ray::AgentRunner")
            actor.kill()
            streams = await work
            assert {stream.reason for stream in streams} == {FinishReason.LENGTH}
            assert not any(stream.num_misplaced for stream in streams)
            first, second = streams[:NUM_PROMPTS], streams[NUM_PROMPTS : 2 * NUM_PROMPTS]
            assert [stream.ids for stream in first] == [stream.ids for stream in second]
            assert supervisor.requests.num_resumed >= 1
            await until(lambda: front.engines.num_engines == 2, 60.0)  # Ray started it again, and it joined
            assert (await provider.address(names[victim.name])).agent != victim.name

            await replicas.scale(1)
            assert len(supervisor.replicas) == 1 and replicas.numbers == [0]
            await until(lambda: not front.engines.report() or len(front.engines.report()) == 1)
            before = supervisor.replicas[0].name
            work = asyncio.gather(*(follow(supervisor, make_request(number)) for number in range(200, 220)))
            await replicas.roll(replicas.template)
            assert {stream.reason for stream in await work} == {FinishReason.LENGTH}
            assert [replica.name for replica in supervisor.replicas] != [before] and replicas.numbers == [1]
            await replicas.scale(0)
            assert not supervisor.replicas
    finally:
        await provider.close()
