"""Parameters of which `make test` takes some, and `make test-slow` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """The values as parameters; of each `count`, all but the first are slow tests."""
    return [
        pytest.param(value, marks=pytest.mark.slow) if index % count else value for index, value in enumerate(values)
    ]
