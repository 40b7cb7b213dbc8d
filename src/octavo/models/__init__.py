"""Models: families as data, and the decoder that computes them.

Owns: the composition of layers. Does not: own KV memory, sample, or know requests.
"""
