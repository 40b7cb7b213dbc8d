"""For tests that register policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.core.policy import POLICIES


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)
