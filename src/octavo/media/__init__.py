"""Images of prompts, from a client's bytes to a model's pixels."""
