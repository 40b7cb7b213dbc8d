"""One engine on several devices or processes: rank 0 is the engine's process and broadcasts every plan to the others.

Read `executor` (rank 0), `process` (any other rank), `group` (the rank processes as seen by rank 0), `frames` (what
travels between them) and `hosts`. This package's modules load no torch, except `joined`.
"""
