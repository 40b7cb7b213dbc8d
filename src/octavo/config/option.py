"""The definition of a setting: default, help, flags and bounds, as metadata of a dataclass's field.

Owns: `option`. Does not: know a setting.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    text: str,
    *flags: str,
    choices: tuple[str, ...] = (),
    within: tuple[float | None, float | None] = (None, None),
    secret: bool = False,
    hidden: bool = False,
) -> Any:
    """Define a setting: default, help, flags (the first is its name in files too), choices and bounds.

    A hidden setting is accepted and not listed: it has no effect yet.
    """
    metadata = {"help": text, "flags": flags, "choices": choices, "low": within[0], "high": within[1]}
    return field(default=default, metadata=metadata | {"secret": secret, "hidden": hidden})
