"""Models: the decoders that compute the families described in artifacts/families.py.

Owns: the composition of layers. Does not: own KV memory, sample, or know requests.
"""
