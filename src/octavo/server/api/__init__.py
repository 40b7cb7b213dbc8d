"""The HTTP APIs. Each has its bodies, their translation to a GenerationRequest, its answers and its routes."""
