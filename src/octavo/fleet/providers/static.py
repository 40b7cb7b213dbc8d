"""Replicas at known addresses: a file with the HOST:PORT of an engine on each line (`octavo fleet --hosts FILE`).

Owns: the file's format. Does not: start engines (`octavo serve MODEL --offer HOST:PORT` runs there already), or dial
them (fleet.remote_engines does). Text after # is a comment; empty lines are ignored.
"""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ConfigError
from octavo.fleet.security import HostPort, parse_address

MAX_HOSTS = 1024


def read_hosts(path: Path) -> list[HostPort]:
    """Return the addresses in the file's order. Raises ConfigError naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--hosts is {str(path)!r}, which cannot be read ({reason}); give a file") from None
    found: dict[HostPort, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        address = parse_address(text, f"{path}, line {number},")
        if address in found:
            raise ConfigError(f"{path}, line {number}: {address} is on line {found[address]} too; remove one of them")
        found[address] = number
    if not found:
        raise ConfigError(f"--hosts is {str(path)!r}, which has no address; give HOST:PORT on each line")
    if len(found) > MAX_HOSTS:
        raise ConfigError(f"{path} has {len(found)} addresses; at most {MAX_HOSTS} are supported")
    return list(found)
