"""How near the simulator comes to what was measured: of vLLM, of published tables, and of this engine itself."""
