"""Octavo's deciding part: pure, deterministic, standard library only."""
