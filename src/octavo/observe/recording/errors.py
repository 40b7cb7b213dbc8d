"""What can be wrong with a recording.

Owns: the exceptions. Both say what to do.
"""

from __future__ import annotations

from octavo.errors import OctavoError


class RecordingError(OctavoError):
    """A recording cannot be read: not there, none, of another version, damaged."""


class DamagedError(RecordingError):
    """What stands in a record cannot be."""
