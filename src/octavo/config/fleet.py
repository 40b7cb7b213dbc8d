"""The settings of fleets: several models, and several engines behind one endpoint, on this machine and on others.

Owns: sections and their options. Does not: read tokens or certificates (fleet.security does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.setting import option

ROUTER_NAMES = (
    "prefix_affinity", "prefix_hash", "sessions", "least_loaded", "least_requests", "power_of_two", "round_robin",
    "random",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """Which models a server has, and when they are loaded and unloaded (docs/fleet.md)."""

    models_file: str | None = option(
        None,
        "YAML file of models, each with its name, its replicas and its own settings (octavo fleet)",
        "--models=FILE",
    )
    keep_alive_s: float = option(
        -1.0,
        "seconds without a request after which a model is unloaded, until a request needs it; 0 = at once, -1 = never",
        "--keep-alive",
        within=(-1.0, None),
        brief="unload a model idle for X seconds [never]",
    )
    max_loaded_models: int | None = option(
        None,
        "maximum models that are loaded at the same time; another one unloads the least recently used (default: all)",
        "--max-loaded-models",
        within=(1, None),
    )
    client_keep_alive: bool = option(
        True, "let the field keep_alive of Ollama's clients replace --keep-alive for its model", "--client-keep-alive"
    )


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The engines of a fleet and how they find their front (docs/fleet.md).

    `octavo fleet` reads all fields but `join` and `offer`, which `octavo serve` reads.
    """

    replicas: int | None = option(
        None,
        "engines that the fleet starts itself, on this machine or with --ray in its cluster; 0 = only those of --hosts "
        "and those that join [1, or 0 with --hosts]",
        "--replicas",
        within=(0, 1024),
        brief="engines to start [1]",
    )
    router: str = option(
        "prefix_affinity",
        "which replica gets a request: one that has its prefix, unless that one is overloaded (prefix_affinity, "
        "sessions), or by load, or in turn",
        "--router",
        choices=ROUTER_NAMES,
        brief="how a replica is chosen for a request",
    )
    hosts: str | None = option(
        None,
        "file with the HOST:PORT of an engine on each line, which octavo serve MODEL --offer HOST:PORT started there",
        "--hosts=FILE",
        brief="file with the HOST:PORT of engines that --offer started",
    )
    ray: str | None = option(
        None,
        "place the --replicas with Ray, in the cluster at ADDRESS; without ADDRESS a local Ray is started",
        "--ray=ADDRESS",
        bare="local",
        brief="place the engines with Ray (extra: ray)",
    )
    plan: str | None = option(
        None,
        "file of octavo simulate --search --json FILE: its replicas, router and engine settings are taken, unless a "
        "flag sets them",
        "--plan=FILE",
        brief="take the answer of octavo simulate --search",
    )

    join: tuple[str, ...] = option(
        (),
        "HOST:PORT of a front whose requests this engine serves, several (with commas) for standby fronts; no HTTP is "
        "served then",
        "--join=HOST:PORT",
    )
    offer: str | None = option(
        None,
        "HOST:PORT to listen on for a front that lists this engine (octavo fleet --hosts); no HTTP is served then",
        "--offer=HOST:PORT",
    )
    fleet_address: str | None = option(
        None,
        "HOST:PORT where the fleet waits for engines that join, which octavo serve MODEL --join HOST:PORT starts",
        "--fleet-address=HOST:PORT",
        brief="HOST:PORT where engines may join",
    )
    journal_address: str | None = option(
        None,
        "HOST:PORT where a standby front may follow this front's --journal (octavo fleet --standby-of)",
        "--journal-address=HOST:PORT",
    )
    standby_of: str | None = option(
        None,
        "HOST:PORT of the --journal-address of a front: keep a copy of its journal in --journal, and serve in its "
        "place once it is gone",
        "--standby-of=HOST:PORT",
    )
    takeover_after_s: float = option(
        8.0,
        "seconds without the front after which a standby serves in its place; a front whose api process crashed is "
        "back sooner",
        "--takeover-after",
        within=(1.0, None),
    )


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """What secures the connections between machines (docs/serving.md)."""

    fleet_token: str | None = option(
        None,
        "secret that all machines of a fleet share, at least 16 bytes; OCTAVO_FLEET_TOKEN keeps it out of the shell's "
        "history",
        "--fleet-token",
        is_secret=True,
    )
    fleet_token_file: str | None = option(None, "file with that secret", "--fleet-token-file=FILE")
    fleet_tls_cert: str | None = option(
        None, "PEM file of this machine's certificate, for TLS between machines", "--fleet-tls-cert=FILE"
    )
    fleet_tls_key: str | None = option(None, "PEM file of that certificate's private key", "--fleet-tls-key=FILE")
    fleet_tls_ca: str | None = option(
        None, "PEM file of the authorities that sign the other machines' certificates", "--fleet-tls-ca=FILE"
    )
