"""What deploy/ holds fits the server: probes, times, flags, ports, secrets. No container engine or cluster is needed.

Kubernetes' own schemas are used where the extra `cluster` is installed, and Ray's where `ray` is.
"""

import configparser
import copy
import ipaddress
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo import cli
from octavo.cli import serve
from octavo.cli.flags import Parser, resolve_args
from octavo.config import SETTINGS, Config, ServingConfig
from octavo.fleet.plan import FleetPlan
from octavo.frontend.api_supervisor import STOP_GRACE_S
from octavo.server.http.endpoints import Access, find_endpoints
from tests.source_tree import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = [*sorted(KUBERNETES.glob("*.yaml")), DEPLOY / "ray" / "kuberay.yaml"]
SCHEMAS = "1.35"  # the version of Kubernetes
FLAGS = {flag for setting in SETTINGS for flag in setting.flags}
VARIABLES = {setting.variables[0] for setting in SETTINGS} | {"OCTAVO_RUN_DIR"}
STOPPING_S = Config().serving.drain_timeout_s + STOP_GRACE_S


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.fixture(scope="module")
def pod() -> Any:
    deployment, service = yaml.safe_load_all((KUBERNETES / "server.yaml").read_text())
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
    texts = [path.read_text() for path in (*files(DEPLOY), *(ROOT / "docs").glob("*.md"), ROOT / "README.md")]
    commands = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    everywhere = [line for line in commands if re.search(r"(octavo serve|docker run .*octavo\b|^CMD)", line)]
    exposed = [
        line for line in everywhere if re.search(r"--host\b", line) or "docker run" in line or line.startswith("CMD")
    ]
    assert len(exposed) >= 4
    assert not [line for line in exposed if "--insecure" in line]
    for line in exposed:
        assert "API_KEY" in line or "--api-key" in line or line.startswith("CMD"), line


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def templates(document: Any) -> list[Any]:
    """The pod templates of an object."""
    if document["kind"] == "RayCluster":
        groups = [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]
        return [group["template"] for group in groups]
    return [document["spec"]["template"]] if document["kind"] in ("Deployment", "StatefulSet") else []


ALL = [(path, document) for path in MANIFESTS for document in documents(path)]
PODS = [
    pytest.param(template["spec"], id=f"{path.stem}-{document['metadata']['name']}-{number}")
    for path, document in ALL
    for number, template in enumerate(templates(document))
]
CONTAINERS = [
    pytest.param(container, id=f"{pod.id}-{container['name']}")
    for pod in PODS
    for container in pod.values[0]["containers"]
]


@pytest.mark.parametrize(
    "document", [pytest.param(doc, id=f"{path.stem}-{doc['kind']}-{doc['metadata']['name']}") for path, doc in ALL]
)
def test_manifests_fit_the_schemas_of_kubernetes(document: Any) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[cluster]'").validate
    if document["kind"] != "RayCluster":
        validate(document, SCHEMAS, strict=True)
    for template in templates(document):  # of a RayCluster too, which is no kind of Kubernetes itself
        validate({"apiVersion": "v1", "kind": "PodTemplate", "template": template}, SCHEMAS, strict=True)


def test_the_schemas_refuse_a_field_that_does_not_exist() -> None:
    module = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[cluster]'")
    deployment, _ = documents(KUBERNETES / "server.yaml")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolicies"] = "Always"
    with pytest.raises(module.ValidationError, match="imagePullPolicies"):
        module.validate(deployment, SCHEMAS, strict=True)


def test_rays_cluster_fits_its_schema() -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    validator = pytest.importorskip("jsonschema").Draft7Validator(schema)
    cluster = yaml.safe_load((DEPLOY / "ray" / "cluster.yaml").read_text())
    assert list(validator.iter_errors(cluster)) == []
    assert list(validator.iter_errors({**cluster, "workers": 2})) != [], "the schema refuses unknown fields"


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_words_that_octavo_parses(container: Any) -> None:
    if not (words := container.get("args")):
        assert container["name"].startswith("ray-"), "only Ray's own containers have a command of KubeRay's"
        return
    command = container.get("command", ["octavo", "serve"])
    assert command[0] == "octavo"
    variables = {"NODE_RANK": "1", "POD_IP": "10.0.0.7"}
    used = [name for name in variables if f"$({name})" in str(words)]
    assert {*used} <= {item["name"] for item in container.get("env", [])}
    words = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]
    parser = Parser(prog=" ".join(command))
    cli.load_command(command[1], parser)
    config = resolve_args(parser.parse(words)).config
    assert config.model.model == "smollm2"
    paths = [word.partition("=")[2] for word in words if word.partition("=")[0].endswith("-file")]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert paths and all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)


@pytest.mark.parametrize("pod", PODS)
def test_every_pod_runs_without_rights(pod: Any) -> None:
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False and rights["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"} and container["resources"]["limits"]
        names = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert names <= {volume["name"] for volume in pod.get("volumes", [])}


def test_replicas_join_the_port_that_the_front_opens() -> None:
    kinds = {(doc["kind"], doc["metadata"]["name"]): doc for doc in documents(KUBERNETES / "fleet.yaml")}
    (front,) = templates(kinds["Deployment", "octavo-front"])
    (replica,) = templates(kinds["Deployment", "octavo-replica"])
    service = kinds["Service", "octavo-front"]
    assert service["spec"]["selector"] == front["metadata"]["labels"] and service["spec"]["publishNotReadyAddresses"]
    (port,) = service["spec"]["ports"]
    assert f"--join=octavo-front:{port['port']}" in replica["spec"]["containers"][0]["args"]
    (container,) = front["spec"]["containers"]
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    assert f"--fleet-address={ipaddress.ip_address(0)}:{ports[port['targetPort']]}" in container["args"]
    volumes = [volume for pod in (front, replica) for volume in pod["spec"]["volumes"]]
    names = [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
    assert names == ["octavo-keys", "octavo-fleet", "octavo-fleet"], "replicas have the fleet's token, and no keys"
    policy = kinds["NetworkPolicy", "octavo-front"]["spec"]["ingress"]
    (peer,) = [rule["from"] for rule in policy if {"protocol": "TCP", "port": "fleet"} in rule["ports"]]
    assert peer == [{"podSelector": {"matchLabels": replica["metadata"]["labels"]}}]


def patched(document: Any, changes: list[Any]) -> Any:
    """A copy of a manifest with the changes of a JSON patch (RFC 6902: add and replace, as kustomize makes them)."""
    document = copy.deepcopy(document)
    for change in changes:
        *folders, name = [part.replace("~1", "/") for part in change["path"].split("/")[1:]]
        target = document
        for folder in folders:
            target = target[int(folder)] if isinstance(target, list) else target[folder]
        if isinstance(target, list) and name == "-":
            target.append(change["value"])
        else:
            key = int(name) if isinstance(target, list) else name
            assert change["op"] == "add" or key in target or isinstance(key, int), change
            target[key] = change["value"]
    return document


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """The manifests of a fleet with the values of a plan, as kustomize makes them: by name."""
    plan = FleetPlan(
        "smollm2", 5, "least_loaded", {"max_sequences": 64, "tensor_parallel_size": 2, "enable_prefix_caching": False},
        device="h100", workload="poisson:rate=4\n# two lines", reached="ttft_p99 0.3",
    )  # fmt: skip
    values = yaml.safe_load(plan.kustomization())
    assert values["kind"] == "Kustomization" and (KUBERNETES / values["resources"][0]).exists()
    deployments = {doc["metadata"]["name"]: doc for doc in documents(KUBERNETES / "fleet.yaml") if templates(doc)}
    for patch in values["patches"]:
        name = patch["target"]["name"]
        deployments[name] = patched(deployments[name], yaml.safe_load(patch["patch"]))
    for counts in values["replicas"]:
        deployments[counts["name"]]["spec"]["replicas"] = counts["count"]
    return deployments


def test_a_plan_s_values_are_taken_by_the_fleet_s_manifests(planned: dict[str, Any]) -> None:
    front, replica = (planned[name]["spec"] for name in ("octavo-front", "octavo-replica"))
    assert (front["replicas"], replica["replicas"]) == (1, 5)
    (pod,) = replica["template"]["spec"]["containers"]
    assert pod["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 2}
    (ours,) = front["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in ours["resources"]["limits"], "the front computes no model"
    for container, router in ((ours, "least_loaded"), (pod, Config().fleet.router)):
        assert len([word for word in container["args"] if word.startswith("--model=")]) == 1
        parser = Parser(prog="octavo")
        cli.load_command(container["command"][1], parser)
        config = resolve_args(parser.parse(container["args"])).config
        assert (config.model.model, config.scheduling.max_sequences, config.fleet.router) == ("smollm2", 64, router)
        assert config.parallel.tensor_parallel_size == 2 and not config.cache.enable_prefix_caching
        assert config.link.fleet_token_file == "/etc/octavo-fleet/token", "what the manifest gave is kept"


def test_manifests_with_a_plan_s_values_fit_the_schemas_of_kubernetes(planned: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[cluster]'").validate
    for deployment in planned.values():
        validate(deployment, SCHEMAS, strict=True)


def test_as_many_pods_as_hosts_of_ranks() -> None:
    ranks, *others = documents(KUBERNETES / "ranks.yaml")
    (container,) = ranks["spec"]["template"]["spec"]["containers"]
    name, service = ranks["metadata"]["name"], ranks["spec"]["serviceName"]
    assert f"--nnodes={ranks['spec']['replicas']}" in container["args"]
    assert (
        f"--master-addr={name}-0.{service}" in container["args"] and ranks["spec"]["podManagementPolicy"] == "Parallel"
    )
    headless = next(doc for doc in others if doc["metadata"]["name"] == service and doc["kind"] == "Service")
    assert headless["spec"]["clusterIP"] == "None" and headless["spec"]["publishNotReadyAddresses"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--master-port={ports['ranks']}" in container["args"]
    http = next(doc for doc in others if doc["metadata"]["name"] == "octavo")
    assert http["spec"]["selector"] == {"statefulset.kubernetes.io/pod-name": f"{name}-0"}, "host 0 serves"
