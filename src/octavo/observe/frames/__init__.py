"""Frames: a scheduler's activity for pages and terminals (docs/statistics.md), live, replayed or simulated."""
