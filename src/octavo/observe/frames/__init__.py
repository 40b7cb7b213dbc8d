"""Frames: what pages and terminals draw of a scheduler at work (docs/frames.md), from whatever runs it."""
