"""A reader of frames as a page is one: it knows nothing but docs/statistics.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = tuple[str, int, int, int]  # request, choice, first position, tokens


class FrameReader:
    """Follows a stream; `steps` are (number, rows) as the frames have them."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.slots: dict[int, tuple[str, int]] = {}
        self.open: dict[str, list[Any]] = {}
        self.rows: list[tuple[int, int, int]] = []
        self.steps: list[tuple[int, list[Row]]] = []
        self.decisions: list[list[Any]] = []
        self.looks: list[dict[str, Any]] = []
        self.num_heads = 0
        self.end: dict[str, Any] | None = None

    def read(self, frames: Iterable[dict[str, Any]]) -> None:
        for frame in frames:
            getattr(self, f"_{frame['k']}")(frame)

    def _head(self, frame: dict[str, Any]) -> None:
        self.num_heads += 1
        self.head, self.rows = frame, []
        self.slots = {slot: (name, choice) for slot, name, choice, _ in frame["slots"]}
        self.open = {entry[0]: entry for entry in frame["open"]}

    def _step(self, frame: dict[str, Any]) -> None:
        self._news(frame)
        for slot in frame.get("freed", ()):
            self.slots.pop(slot, None)
        for slot, name, choice, _ in frame.get("new", ()):
            self.slots[slot] = name, choice
        if "rows" in frame:
            flat = frame["rows"]
            self.rows = list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
        else:
            self.rows = [(slot, start + count, count) for slot, start, count in self.rows]
        self.steps.append((frame["n"], [(*self.slots[slot], start, count) for slot, start, count in self.rows]))

    def _note(self, frame: dict[str, Any]) -> None:
        self._news(frame)

    def _news(self, frame: dict[str, Any]) -> None:
        for entry in frame.get("in", ()):
            self.open[entry[0]] = entry
        for event in frame.get("ev", ()):
            self.decisions.append(event)
            if event[0] == "finished":
                self.open.pop(event[1], None)

    def _queue(self, frame: dict[str, Any]) -> None:
        self.looks.append(frame)

    def _blocks(self, frame: dict[str, Any]) -> None:
        self.looks.append(frame)

    def _end(self, frame: dict[str, Any]) -> None:
        self.end = frame
