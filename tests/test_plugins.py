"""Policies of others: found by entry point or by path, reported when broken; the example of the docs runs."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import octavo
from octavo import plugins
from octavo.assembly import open_engine
from octavo.config.sources import config_from_keywords
from octavo.core.policy import POLICIES
from octavo.errors import ConfigError
from octavo.simulator.search import process_pool
from tests.core.harness import Run, limits, prompt
from tests.source_tree import ROOT

GOOD = """
import octavo

class Biggest(octavo.Policy):
    name = "biggest"
    def key(self, request):
        return (-request.request.num_prompt_tokens,)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution of one module with entry points, as a wheel would lie on the path."""
    policies = dict(POLICIES)
    loaded = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_policies.cache_clear()

    def make(module: str, code: str, **entries: str) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.2\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{plugins.GROUP}]", *lines]))
        importlib.invalidate_caches()

    yield make
    POLICIES.clear()
    POLICIES.update(policies)
    plugins.load_policies.cache_clear()
    for name in set(sys.modules) - loaded:
        if not name.startswith(("octavo", "tests", "torch")):
            del sys.modules[name]


def test_S06_an_installed_policy_is_found_by_its_entry_point(install: Install) -> None:
    install("my_policies", GOOD, biggest="my_policies:Biggest")
    assert plugins.load_policies() == {}
    assert plugins.find_policy("biggest") == "biggest"
    run = Run(limits(policy="biggest", max_sequences=1))
    for length in (3, 9, 6):
        run.admit(prompt(length, length), 1)
    run.is_ordered = False
    run.finish()
    assert [new.request_id for plan in run.plans for new in plan.new_sequences] == ["r1", "r2", "r0"]


def test_S06_policies_are_loaded_once(install: Install) -> None:
    install("my_policies", GOOD + "\nprint('loaded')", biggest="my_policies:Biggest", again="my_policies:Biggest")
    assert plugins.load_policies() is plugins.load_policies()
    assert sum(name == "biggest" for name in POLICIES) == 1


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("raise RuntimeError('half written')", "broken_one:X", "RuntimeError: half written"),
        ("import no_such_module_at_all", "broken_one:X", "ModuleNotFoundError"),
        ("x = 1", "broken_one:X", "AttributeError"),
        ("X = 7", "broken_one:X", "is no policy; give a subclass of octavo.Policy"),
        ("import octavo\nclass X(octavo.Policy): name = 'fair'", "broken_one:X", "registered already"),
        ("import octavo\nclass X(octavo.Policy): pass", "broken_one:X", "give it a name"),
    ],
)
def test_S06_a_broken_plug_in_is_named_and_stops_nothing_else(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, value: str, reason: str
) -> None:
    install("broken_one", code, sick=value)
    install("my_policies", GOOD, biggest="my_policies:Biggest")
    with caplog.at_level(logging.WARNING, "octavo.plugins"):
        failures = plugins.load_policies()
    assert list(failures) == ["sick"] and reason in failures["sick"]
    [message] = [record.getMessage() for record in caplog.records]
    assert "policy plug-in sick (broken_one:X, from broken-one 1.2) is left out" in message
    assert reason in message and "mend or uninstall it" in message
    assert plugins.find_policy("biggest") == "biggest" and plugins.find_policy("fcfs") == "fcfs"
    with pytest.raises(ConfigError, match="policy plug-in 'sick' does not load"):
        plugins.find_policy("sick")


def test_S06_a_policy_can_be_given_by_module_and_class(install: Install) -> None:
    install("my_policies", GOOD)
    assert plugins.find_policy("my_policies:Biggest") == "biggest"
    assert plugins.find_policy("my_policies:Biggest") == "biggest"  # again: the same class


def test_S06_processes_of_a_simulation_know_such_a_policy(install: Install) -> None:
    install("my_policies", GOOD)
    plugins.find_policy("my_policies:Biggest")
    with process_pool(1) as pool:
        assert pool.submit(plugins.find_policy, "biggest").result() == "biggest"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_at_all:X", "ModuleNotFoundError.*PYTHONPATH"),
        ("my_policies:Missing", "AttributeError.*module:Class"),
        (":", "does not load"),
        ("my_policies:", "does not load"),
        ("my_policies:octavo", "is no policy"),
    ],
)
def test_S06_a_path_that_leads_nowhere_is_answered_with_the_remedy(install: Install, path: str, message: str) -> None:
    install("my_policies", GOOD)
    with pytest.raises(ConfigError, match=message):
        plugins.find_policy(path)


def test_S06_an_unknown_policy_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'fastest'; give one of deadline, fair, fcfs"):
        open_engine(config_from_keywords("/nowhere/at/all", {"policy": "fastest"}))


def test_the_package_offers_what_a_policy_needs() -> None:
    from octavo.core import policy, request_state

    assert octavo.Policy is policy.Policy
    assert octavo.register_policy is policy.register_policy
    assert octavo.RequestState is request_state.RequestState


# -- the example of docs/policies.md

PAGE = ROOT / "docs" / "policies.md"


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_S06_the_example_of_the_docs_is_short_and_does_what_it_says(install: Install) -> None:
    """Installed by its own entry point: paying tenants first, others after five seconds at most; free ones give way."""
    [code] = blocks("python")
    [entry] = blocks("toml")
    assert code.count("\n") < 40
    found = re.search(r'\[project\.entry-points\."octavo\.policies"\]\n(\w+) = "(\w+):(\w+)"', entry)
    assert found is not None
    name, module, kind = found.groups()
    install(module, code, **{name: f"{module}:{kind}"})
    assert plugins.load_policies() == {} and plugins.find_policy(name) == name
    run = Run(limits(policy=name, max_sequences=1))
    run.is_ordered = False
    for tenant, arrival in (("free", 0.0), ("free", 1.0), ("acme", 4.0), ("acme", 5.6), ("zeta", 0.5)):
        run.admit(prompt(5, int(arrival * 2)), 1, tenant=tenant, arrival=arrival)
    run.finish()
    order = [new.request_id for plan in run.plans for new in plan.new_sequences]
    assert order == ["r2", "r0", "r4", "r3", "r1"]
    policy = run.scheduler._state.policy
    assert policy.num_errors == 0, policy.first_error
