"""Kernels: one file per operation, with a plain torch twin for every faster form.

Owns: the operations and their choice of implementation. Does not: know models, slots or requests.
"""
