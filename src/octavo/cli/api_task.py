"""The task that `octavo serve` gives one run of its api process: a line of JSON on stdin.

Owns: its form, and the command that runs it. Does not: import anything heavy, as the supervisor imports it too.
"""

from __future__ import annotations

import sys

import msgspec

from octavo.config import Config
from octavo.errors import ConfigError

COMMAND = (sys.executable, "-m", "octavo.cli.api_process")


class ApiTask(msgspec.Struct, frozen=True):
    """The task of one run of the api process. `life` counts runs from 1; `supervisor` is its parent's pid, 0: none."""

    config: Config
    admin: str
    life: int = 1
    supervisor: int = 0
    is_quiet: bool = False

    def line(self) -> bytes:
        """Return the line to write to stdin."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> ApiTask:
        """Parse the line read from stdin. Raises ConfigError."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the task on stdin cannot be read: {error}") from None
