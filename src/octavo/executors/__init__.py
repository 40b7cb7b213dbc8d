"""Executors: what runs a plan. The protocol imports no torch; implementations are wired in by assembly."""
