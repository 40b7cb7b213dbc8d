"""Layers (linear, norm, rotary positions, embedding) and the loading of their weights.

Owns: parameters. Does not: know families, requests or the KV pool.
"""
