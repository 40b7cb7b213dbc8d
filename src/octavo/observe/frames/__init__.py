"""Frames: what pages and terminals draw of a scheduler at work (docs/statistics.md), from whatever runs it."""
