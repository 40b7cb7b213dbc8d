"""The recorders of one engine: that of --record, and the flight recorder of an engine process.

Owns: opening them as configured, and joining them to an engine. Does not: record (recorder and flight do).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.config import SETTINGS, Config
from octavo.core.saved_state import SavedState
from octavo.core.tap import CallTap, FanOutTap
from octavo.observe.recording.flight import FlightRecorder, open_flight_recorder
from octavo.observe.recording.format import Header
from octavo.observe.recording.recorder import Recorder, open_recorder

__all__ = ["EngineRecorders", "Header", "open_recorders", "recorded_settings"]
_RECORDED = ("cache", "scheduling", "execution", "speculation")  # sections of the settings that a header has


@dataclass(frozen=True, slots=True)
class EngineRecorders:
    """What records one engine; at least one of both."""

    recorder: Recorder | None
    flight: FlightRecorder | None

    @property
    def tap(self) -> CallTap:
        """The tap for the scheduler."""
        taps = [tap for tap in (self.recorder, self.flight) if tap is not None]
        return FanOutTap(taps) if len(taps) > 1 else taps[0]

    def join(
        self,
        save: Callable[[], SavedState],
        sections: dict[str, Callable[[], object]],
        closers: list[Callable[[], object]],
    ) -> None:
        """Give the flight recorder the scheduler's state; add sections to an engine's statistics, and what ends it."""
        if self.recorder is not None:
            closers.append(self.recorder.close)
            sections["recording"] = self.recorder.status
        if self.flight is not None:
            self.flight.save = save
            closers.append(self.flight.close)
            sections["flight_recorder"] = self.flight.status

    def attach(self, files: Sequence[int]) -> None:
        """Give the flight recorder its files."""
        if self.flight is not None:
            self.flight.attach(files)


def recorded_settings(config: Config) -> Mapping[str, object]:
    """Return the engine's settings by flag, for a header."""
    values = {
        setting.key: getattr(getattr(config, setting.section), setting.name)
        for setting in SETTINGS
        if setting.section in _RECORDED
    }
    return {key: value for key, value in values.items() if value is not None}


def open_recorders(
    config: Config, header: Header, clock: Callable[[], float], has_flight: bool
) -> EngineRecorders | None:
    """Open what is configured; None if nothing is. Raises ConfigError if the folder cannot be written to."""
    recorder = None if config.recording.record is None else open_recorder(config.recording, header, clock)
    flight = None
    if has_flight and config.flight.flight_recorder > 0:
        flight = open_flight_recorder(config.flight, header, config.recording.record_text, clock)
    return None if recorder is None and flight is None else EngineRecorders(recorder, flight)
