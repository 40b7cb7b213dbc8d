"""Recordings: write every call of a live scheduler to a file, read it back, and replay it to the same decisions."""

from octavo.observe.recording.format import Header, RecordingError
from octavo.observe.recording.reader import RecordedStep, Recording, Segment, open_recording, steps
from octavo.observe.recording.replaying import Difference, MakeSink, ReplayReport, replay
from octavo.observe.recording.requests import RecordedRequest, arrivals

__all__ = [
    "Difference",
    "Header",
    "MakeSink",
    "RecordedRequest",
    "RecordedStep",
    "Recording",
    "RecordingError",
    "ReplayReport",
    "Segment",
    "arrivals",
    "open_recording",
    "replay",
    "steps",
]
