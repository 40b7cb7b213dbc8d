"""Kernels: one file per operation, each with a plain torch twin beside every faster form.

Owns: the operations and their choice of implementation. Does not: know models, slots or requests.
"""
