"""Recordings: every call of a live scheduler in a file, read back, and replayed to the same decisions."""

from octavo.trace.recording.arrivals import RecordedRequest, arrivals
from octavo.trace.recording.calls import Header
from octavo.trace.recording.reader import Recording, Segment, open_recording
from octavo.trace.recording.replaying import Difference, MakeSink, ReplayReport, replay
from octavo.trace.recording.steps import RecordedStep, steps

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
