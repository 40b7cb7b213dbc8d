"""Models: families as data, and the decoder that computes them.

Owns: how layers are put together. Does not: own KV memory, sample, or know requests.
"""
