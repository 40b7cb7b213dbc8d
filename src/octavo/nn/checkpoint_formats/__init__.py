"""Formats of quantised safetensors checkpoints: one module reads each family of formats.

A module yields the matrices that its codes stand for, under the names of the plain weights. What a tensor is follows
from the tensors beside it; so layers that a checkpoint leaves as floats need no list.
"""
