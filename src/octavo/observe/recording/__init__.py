"""Recordings: every call of a live scheduler in a file, read back, and replayed to the same decisions."""

from octavo.observe.recording.arrivals import RecordedRequest, arrivals
from octavo.observe.recording.calls import Header
from octavo.observe.recording.reader import Recording, Segment, open_recording
from octavo.observe.recording.replaying import Difference, MakeSink, ReplayReport, replay
from octavo.observe.recording.steps import RecordedStep, steps

__all__ = [
    "Difference",
    "Header",
    "MakeSink",
    "RecordedRequest",
    "RecordedStep",
    "Recording",
    "ReplayReport",
    "Segment",
    "arrivals",
    "open_recording",
    "replay",
    "steps",
]
