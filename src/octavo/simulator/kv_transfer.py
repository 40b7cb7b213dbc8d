"""KV transfers between engines: the links, their ports, and when each transfer begins and ends.

Owns: KVLink with the known links, KVTransfers. Does not: choose engines, or hold blocks (core does, see
Scheduler.keep_kv and expect_kv).
A transfer takes the link's latency and its bytes / bandwidth. It needs the sending port of its source and the receiving
port of its target at once, and each port serves one transfer at a time, in the order in which they are asked for. Each
device of an engine has ports of its own and sends its share of the KV, so a transfer has one duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from octavo.config.spelling import unknown
from octavo.errors import ConfigError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class KVLink:
    """A link between engines: bytes per second in one direction of a port, and seconds before the first byte."""

    name: str
    bandwidth: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigError(f"bandwidth of link {self.name} is {self.bandwidth:g}; give bytes per second above 0")
        if not 0 <= self.latency_s < inf:
            raise ConfigError(f"latency of link {self.name} is {self.latency_s:g}; give seconds of at least 0")


# Rates of the standards and data sheets, in one direction. Latencies are rounded, typical ones of a message between two
# devices; software adds its own.
LINKS: dict[str, KVLink] = {
    link.name: link
    for link in (
        KVLink("nvlink3", 300e9, 5e-6),  # NVIDIA A100 data sheet: 600 GB/s in both directions
        KVLink("nvlink4", 450e9, 5e-6),  # NVIDIA H100 data sheet: 900 GB/s in both directions
        KVLink("nvlink5", 900e9, 5e-6),  # NVIDIA B200 data sheet: 1.8 TB/s in both directions
        KVLink("pcie4-x16", 31.5e9, 10e-6),  # PCI Express 4.0: 16 GT/s x 16 lanes, 128b/130b
        KVLink("pcie5-x16", 63.0e9, 10e-6),  # PCI Express 5.0: 32 GT/s x 16 lanes, 128b/130b
        KVLink("ib-hdr", 25e9, 5e-6),  # InfiniBand HDR: 200 Gb/s
        KVLink("ib-ndr", 50e9, 5e-6),  # InfiniBand NDR: 400 Gb/s
        KVLink("roce-100g", 12.5e9, 10e-6),  # RoCE v2 on 100 Gb/s Ethernet
        KVLink("ethernet-100g", 12.5e9, 50e-6),  # TCP on 100 Gb/s Ethernet
        KVLink("ethernet-25g", 3.125e9, 50e-6),  # TCP on 25 Gb/s Ethernet
    )
}


def read_link(text: str) -> KVLink:
    """Return the link `NAME`, or `bandwidth=50e9,latency=20us`. Raises ConfigError."""
    if "=" not in text:
        if text not in LINKS:
            raise ConfigError(unknown("KV link", text, LINKS, f"give one of {', '.join(LINKS)}, or bandwidth=50e9"))
        return LINKS[text]
    values = read_values(text, ("bandwidth", "latency"))
    if values is None:
        raise ConfigError(f"KV link is {text!r}; give a name, or bandwidth=50e9,latency=20us")
    return KVLink("custom", values["bandwidth"], values["latency"])


def read_values(text: str, names: Sequence[str]) -> dict[str, float] | None:
    """Read `NAME=NUMBER,...`, 0 for names that are left out; None if it is wrong. Times may end in us, ms or s."""
    values = dict.fromkeys(names, 0.0)
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        unit = next((unit for unit in _SECONDS if name != "bandwidth" and value.endswith(unit)), "")
        try:
            number = float(value.removesuffix(unit)) * _SECONDS.get(unit, 1.0)
        except ValueError:
            return None
        if name not in values or number < 0:
            return None
        values[name] = number
    return values


class KVTransfer(NamedTuple):
    """A transfer of the KV of `tokens` tokens between two engines (numbers). Times are in seconds.

    A prefill ended at `handed`. The target had blocks at `reserved`, and the ports were free at `begins`. `num_bytes`
    is that of all devices.
    """

    source: int
    target: int
    tokens: int
    num_bytes: float
    handed: float
    reserved: float
    begins: float
    ends: float


class KVTransfers:
    """The ports of all engines. `token_bytes` is the KV of a token; engine n divides it over `devices[n]` devices."""

    def __init__(self, link: KVLink, token_bytes: float, devices: list[int]) -> None:
        self._link, self._token_bytes, self._devices = link, token_bytes, devices
        self._sends_at = [0.0] * len(devices)  # when each engine's sending port is free
        self._receives_at = [0.0] * len(devices)

    def begin(self, source: int, target: int, tokens: int, handed: float, now: float) -> KVTransfer:
        """Queue a transfer at both ports."""
        begins = max(now, self._sends_at[source], self._receives_at[target])
        ports = min(self._devices[source], self._devices[target])
        num_bytes = tokens * self._token_bytes
        ends = begins + self._link.latency_s + num_bytes / (ports * self._link.bandwidth)
        self._sends_at[source] = self._receives_at[target] = ends
        return KVTransfer(source, target, tokens, num_bytes, handed, now, begins, ends)
