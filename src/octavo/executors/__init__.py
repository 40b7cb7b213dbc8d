"""Executors, which run plans. The protocol imports no torch; the assembly chooses the implementation."""
