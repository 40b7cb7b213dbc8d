"""Simulates the scheduler under a virtual clock: workloads, cost models, an engine or a fleet, and figures of a run."""
