"""The HTTP interfaces: each API with its body, its translation to a GenerationRequest, its answers and its routes."""
