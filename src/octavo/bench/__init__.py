"""Measurements of this engine, its scheduler, kernels and simulator, of servers, and of other engines beside it.

Owns: workloads, running them, the numbers and their tables.
Does not: import torch before a model is run.
"""
