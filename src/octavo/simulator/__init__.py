"""The scheduler under a virtual clock: workloads, cost models, one engine or a fleet, and the figures of a run."""
