"""What deploy/ holds fits the server: probes, times, variables, copied paths. No container engine is needed."""

import configparser
import ipaddress
import json
import re
import shlex
from typing import Any

import pytest
import yaml

from octavo import cli
from octavo.cli import serve
from octavo.config import SETTINGS, Config, ServingConfig
from octavo.frontend.api_supervisor import STOP_GRACE_S
from octavo.server.http.endpoints import Access, find_endpoints
from tests.source_tree import ROOT

DEPLOY = ROOT / "deploy"
FLAGS = {flag for setting in SETTINGS for flag in setting.flags}
VARIABLES = {setting.variables[0] for setting in SETTINGS} | {"OCTAVO_RUN_DIR"}
STOPPING_S = Config().serving.drain_timeout_s + STOP_GRACE_S


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.fixture(scope="module")
def pod() -> Any:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    return deployment["spec"]["template"]["spec"]


def test_probes_ask_open_paths_on_the_servers_port(pod: Any) -> None:
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert [probe["path"] for probe in probes.values()] == ["/readyz", "/readyz", "/livez"]
    assert all(find_endpoints().access[probe["path"]] is Access.OPEN for probe in probes.values()), "a probe has no key"
    assert {ports[probe["port"]] for probe in probes.values()} == {ServingConfig().port}


def test_the_grace_period_holds_a_whole_drain(pod: Any) -> None:
    (container,) = pod["containers"]
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    given = [word for word in container["args"] if word.startswith("--shutdown-timeout")]
    drain_s = float(given[0].partition("=")[2]) if given else Config().serving.drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + STOP_GRACE_S
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] >= 60, "the server sees to itself first"


def test_the_pod_gives_flags_that_exist_and_a_key(pod: Any) -> None:
    (container,) = pod["containers"]
    assert flags_of(container["args"]) <= FLAGS
    assert any(word.startswith("--api-key-file=") for word in container["args"])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/dev/shm", "/home/octavo/.cache"} <= mounts, "the root is read-only"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_unit_waits_for_a_drain_and_gives_flags_that_exist() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "octavo.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > STOPPING_S
    assert flags_of(shlex.split(service["ExecStart"])) <= FLAGS
    text = (DEPLOY / "octavo.service").read_text()
    assert set(re.findall(r"^Environment=(OCTAVO_\w+)=", text, re.MULTILINE)) <= VARIABLES


def test_the_image_copies_what_a_build_needs_and_nothing_that_is_ignored() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "csrc", "src"} == set(copied)
    assert all((ROOT / name).exists() and name not in ignored for name in copied)


def test_the_image_runs_as_nobody_special_and_asks_for_readiness() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.count("\nFROM ") == 2 and re.search(r"^USER 10001$", text, re.MULTILINE)
    health = re.search(r"^HEALTHCHECK (.*)\\\n(.*)", text, re.MULTILINE)
    assert health is not None and "/readyz" in health[2] and f":{ServingConfig().port}/" in health[2]
    assert set(re.findall(r"\b(OCTAVO_\w+)=", text)) <= VARIABLES
    command = re.search(r"^CMD (\[.*\])", text, re.MULTILINE)
    assert command is not None and flags_of(yaml.safe_load(command[1])) <= FLAGS


def test_the_image_needs_a_key_and_says_so(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command as it stands, with its variables: without a key it ends before anything loads."""
    text = (DEPLOY / "Dockerfile").read_text()
    words = [yaml.safe_load(line) for line in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])", text, re.MULTILINE)]
    variables = dict(re.findall(r"\b(OCTAVO_\w+)=(\S+)", text.partition("\nFROM ")[2]))
    assert variables["OCTAVO_HOST"] == str(ipaddress.ip_address(0)), "or no port could be mapped"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OCTAVO_PORT", "0")
    monkeypatch.setattr(serve, "_supervise", lambda task, listener: 77)
    entry, default = words
    assert entry[0] == "octavo" and "--insecure" not in default
    assert cli.main([*entry[1:], *default]) == 2
    said = capfd.readouterr().err
    assert variables["OCTAVO_LOG_FORMAT"] == "json"
    (line,) = said.splitlines()
    message = json.loads(line)["message"]
    assert message.startswith("--host is") and "there is no key" in message and "OCTAVO_API_KEY" in message
    for key, status in (("", 2), ("   ", 2), ("secret", 2), ("k" * 16, 77)):
        monkeypatch.setenv("OCTAVO_API_KEY", key)
        assert cli.main([*entry[1:], *default]) == status, key


def test_no_file_of_deploy_nor_a_documented_command_serves_all_addresses_without_a_key() -> None:
    texts = [path.read_text() for path in (*DEPLOY.iterdir(), *(ROOT / "docs").glob("*.md"), ROOT / "README.md")]
    commands = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    everywhere = [line for line in commands if re.search(r"(octavo serve|docker run .*octavo\b|^CMD)", line)]
    exposed = [line for line in everywhere if "--host" in line or "docker run" in line or line.startswith("CMD")]
    assert len(exposed) >= 4
    assert not [line for line in exposed if "--insecure" in line]
    for line in exposed:
        assert "API_KEY" in line or "--api-key" in line or line.startswith("CMD"), line
