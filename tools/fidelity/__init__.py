"""Compares the simulator with measurements of vLLM, with published tables, and with this engine's own runs."""
