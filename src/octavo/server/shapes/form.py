"""AnswerSpec: what an answer's shape is made from.

Does not: know any shape (registry does).
Invariant: the same form and deltas give the same bytes, so that an answer can be shaped again, by another server too.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class AnswerSpec(Struct, frozen=True, array_like=True):
    """Plain data. `kind` names the shape; `facts` holds what one kind alone needs."""

    kind: str
    identity: tuple[str, int, str]
    include_usage: bool = False
    echoes: tuple[str, ...] = ("",)
    n: int = 1
    facts: dict[str, Any] = {}
