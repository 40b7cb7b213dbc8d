"""The checks and the key of a processed image."""

from __future__ import annotations

import pytest

from octavo.media.item import MediaItem, item_key

PLACE = ((1, 2, 3), (1, 1, 1), (20, 30))


def test_the_key_depends_on_everything() -> None:
    data = bytes(18)
    keys = {
        item_key(b"a", *PLACE, data),
        item_key(b"b", *PLACE, data),
        item_key(b"a", (1, 3, 2), *PLACE[1:], data),
        item_key(b"a", PLACE[0], (1, 1, 2), PLACE[2], data),
        item_key(b"a", *PLACE[:2], (30, 20), data),
        item_key(b"a", *PLACE, bytes(17) + b"x"),
    }
    assert len(keys) == 6 and {len(key) for key in keys} == {16}


@pytest.mark.parametrize(
    ("key", "shape", "data"),
    [(bytes(16), (1, 2, 3), bytes(17)), (bytes(15), (1, 2, 3), bytes(18)), (bytes(16), (0, 2, 3), b""),
     (bytes(16), (1, 1 << 20, 1 << 20), b"")],
)  # fmt: skip
def test_inconsistent_items_are_refused(key: bytes, shape: tuple[int, int, int], data: bytes) -> None:
    with pytest.raises(ValueError, match="pixels"):
        MediaItem(key, "image", shape, (1, 1, 1), (20, 30), data)
