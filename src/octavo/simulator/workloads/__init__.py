"""Workloads: requests that are generated, or read from public traces and one's own recordings."""

from octavo.simulator.workloads.catalogue import KINDS, SimulatedWorkload, open_workload
from octavo.simulator.workloads.shaping import Shaping

__all__ = ["KINDS", "Shaping", "SimulatedWorkload", "open_workload"]
