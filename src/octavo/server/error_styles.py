"""How an error looks in each interface.

Owns: the styles, by path. Does not: decide what is an error (faults does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.server.faults import ApiError

Style = Callable[["ApiError"], dict[str, Any]]


def openai_error(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object."""
    return error.body()


STYLES: Mapping[str, Style] = {}  # the path's beginning -> style; any other path has OpenAI's


def style_of(path: str) -> Style:
    """The style of the interface that a path belongs to."""
    return next((style for begin, style in STYLES.items() if path.startswith(begin)), openai_error)
