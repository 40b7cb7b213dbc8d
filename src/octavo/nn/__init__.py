"""Layers: linear, norm, rotary positions, embedding, and their weights' loaders.

Owns: parameters. Does not: know families, requests or the KV pool.
"""
