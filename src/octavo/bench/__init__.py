"""Measurements: offline throughput beside the memory floor, and the scheduler's own cost.

Owns: workloads, running them, the numbers and their tables.
Does not: drive other engines, or import torch before a model is run.
"""
