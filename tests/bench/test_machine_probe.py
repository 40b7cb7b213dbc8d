"""The probes give rates that a machine can have."""

from __future__ import annotations

from octavo.bench import machine_probe


def test_rates_are_plausible(monkeypatch) -> None:
    monkeypatch.setattr(machine_probe, "MIN_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(machine_probe, "BUDGET_S", 0.02)
    rates = machine_probe.probe("cpu", "float32")
    assert 1e8 < rates.bandwidth < 1e13
    assert 1e8 < rates.flops < 1e15
