"""The settings of engines on other machines.

Owns: sections and their options. Does not: read tokens or certificates (fleet.security does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.setting import option


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The engines of a fleet and how they find their front (docs/fleet.md)."""

    join: tuple[str, ...] = option(
        (),
        "HOST:PORT of a front whose requests this engine serves, several (with commas) for standby fronts; no HTTP is "
        "served then",
        "--join",
        brief="serve the requests of the front at HOST:PORT",
    )
    offer: str | None = option(
        None,
        "HOST:PORT to listen on for a front that lists this engine (octavo fleet --hosts); no HTTP is served then",
        "--offer",
    )
    fleet_address: str = option(
        "127.0.0.1:8765", "HOST:PORT where a front waits for engines that join (--join)", "--fleet-address"
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
    fleet_token_file: str | None = option(None, "file with that secret", "--fleet-token-file")
    fleet_tls_cert: str | None = option(
        None, "PEM file of this machine's certificate, for TLS between machines", "--fleet-tls-cert"
    )
    fleet_tls_key: str | None = option(None, "PEM file of that certificate's private key", "--fleet-tls-key")
    fleet_tls_ca: str | None = option(
        None, "PEM file of the authorities that sign the other machines' certificates", "--fleet-tls-ca"
    )
