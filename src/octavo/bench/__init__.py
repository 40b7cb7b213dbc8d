"""Benchmarks of this engine, its scheduler, its kernels and its simulator, of servers, and of other engines.

Owns: workloads, benchmark runs, figures and tables.
Does not: import torch before it runs a model.
"""
