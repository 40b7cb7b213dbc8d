"""DeviceFacts: a device's numbers from its data sheet.

Owns: the facts, presets with their public numbers, and a probe of this machine.
Does not: predict (roofline), or know models. Peaks are dense (no structured sparsity) with 32-bit accumulation.
Prices are common rents by the hour: a starting point to be replaced by one's own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from octavo import machine
from octavo.config.spelling import unknown
from octavo.errors import ConfigError

GIB, GB, TERA = 2.0**30, 1e9, 1e12


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device: FLOP/s by the bytes of a weight (16, 8 and 4 bits; 0 = not in hardware), bytes/s, bytes.

    `link_bandwidth` (bytes/s a direction) and `link_s` (latency of an all-reduce) join devices of one replica,
    `host_bandwidth` the host. `kernel_s` is a layer's overhead between its kernels, `step_s` a step's overhead outside
    the layers, on the device and on the host before it. `price` is in dollars per hour. A measured device's `flops16`
    is its rate at 32 bits.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops16: float
    flops8: float = 0.0
    flops4: float = 0.0
    link_bandwidth: float = 25 * GB
    link_s: float = 20e-6
    host_bandwidth: float = 25 * GB
    kernel_s: float = 8e-6
    step_s: float = 1e-3
    price: float = 0.0
    is_measured: bool = False

    def flops(self, weight_bytes: float) -> float:
        """Return peak FLOP/s for weights of that many bytes each; of wider units where narrow ones do not exist."""
        if weight_bytes < 0.75 and self.flops4:
            return self.flops4
        if weight_bytes <= 1.25 and self.flops8:
            return self.flops8
        return self.flops16 if weight_bytes <= 2 or self.is_measured else self.flops16 / 2


def _gpu(name: str, gib: float, gbs: float, tflops: tuple[float, ...], price: float) -> DeviceFacts:
    flops16, flops8, flops4 = (peak * TERA for peak in (*tflops, 0.0, 0.0)[:3])
    return DeviceFacts(name, gib * GIB, gbs * GB, flops16, flops8, flops4, price=price)


def _linked(device: DeviceFacts, gbs: float) -> DeviceFacts:
    """Return the device with the links of NVLink or the like."""
    return replace(device, link_bandwidth=gbs * GB, link_s=8e-6)


# Data sheets of NVIDIA and AMD: memory, GB/s, dense TFLOP/s at 16, 8 and 4 bits.
PRESETS: dict[str, DeviceFacts] = {
    device.name: device
    for device in (
        _gpu("t4", 15, 320, (65,), 0.53),
        _gpu("a10g", 22.5, 600, (70,), 1.01),
        _gpu("l4", 22.5, 300, (121, 242.5), 0.71),
        _gpu("l40s", 44.7, 864, (362, 733), 1.10),
        _gpu("rtx4090", 23.6, 1008, (165.2, 330.3), 0.45),
        _gpu("rtx5090", 31.4, 1792, (209.5, 419, 1676), 0.80),
        _gpu("rtxpro6000", 95, 1792, (503.8, 1007.6, 2015), 1.80),
        _gpu("rtxpro6000-server", 95, 1597, (503.8, 1007.6, 2015), 1.80),
        _linked(_gpu("a100-40g", 39.4, 1555, (312,), 1.40), 300),
        _linked(_gpu("a100-80g", 79.1, 2039, (312,), 1.80), 300),
        _gpu("h100-pcie", 79.1, 2000, (756, 1513), 2.40),
        _linked(_gpu("h100", 79.1, 3350, (989.4, 1978.9), 3.00), 450),
        _linked(_gpu("h200", 139.8, 4800, (989.4, 1978.9), 3.60), 450),
        _linked(_gpu("b200", 178, 8000, (2250, 4500, 9000), 5.50), 900),
        _linked(_gpu("b300", 267, 8000, (2250, 4500, 13500), 6.50), 900),
        _linked(_gpu("gb200", 184, 8000, (2500, 5000, 10000), 6.50), 900),
        _linked(_gpu("gb300", 277, 8000, (2500, 5000, 15000), 7.50), 900),
        _linked(_gpu("mi300x", 192, 5300, (1307.4, 2614.9), 2.50), 448),
    )
}
ALIASES = {"a100": "a100-80g", "4090": "rtx4090", "5090": "rtx5090", "h100-sxm": "h100", "h200-sxm": "h200"}
THIS = "this"


def device_facts(name: str) -> DeviceFacts:
    """Return a device by name; "this" measures this machine's CPU (half a second). Raises ConfigError naming all."""
    short = name.lower().removesuffix("_sxm").replace("_", "-").replace(" ", "")
    if short in (THIS, "cpu"):
        return this_machine()
    device = PRESETS.get(ALIASES.get(short, short))
    if device is None:
        raise ConfigError(unknown("device", name, (*PRESETS, THIS), f"give one of {', '.join((*PRESETS, THIS))}"))
    return device


def this_machine() -> DeviceFacts:
    """Measure the rates of numpy's products and copies here: the best of a few short runs."""
    facts = machine.look()
    left, right = (np.ones((768, 768), np.float32) for _ in range(2))
    source, target = (np.ones(1 << 24, np.float32) for _ in range(2))
    product_s = min(_took(lambda: left @ right) for _ in range(5))
    copy_s = min(_took(lambda: np.copyto(target, source)) for _ in range(3))
    peak, bandwidth = 2 * 768**3 / product_s, 2 * source.nbytes / copy_s
    return DeviceFacts(
        THIS, float(facts.available_bytes), bandwidth, peak, link_bandwidth=bandwidth, host_bandwidth=bandwidth,
        kernel_s=20e-6, step_s=0.5e-3, is_measured=True,
    )  # fmt: skip


def _took(work: object) -> float:
    assert callable(work)
    begun = time.perf_counter()
    work()
    return max(time.perf_counter() - begun, 1e-9)
