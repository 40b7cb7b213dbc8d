"""What `octavo serve` tells its api process: the task of one life, a line of JSON on stdin.

Owns: its form, and the command that runs it. Does not: import anything heavy, for the supervisor needs it too.
"""

from __future__ import annotations

import sys

import msgspec

from octavo.config import Config
from octavo.errors import ConfigError

COMMAND = (sys.executable, "-m", "octavo.cli.api_process")


class ApiTask(msgspec.Struct, frozen=True):
    """What one life of the api is to do. `life` counts from 1; `supervisor` is its parent's process, 0 for none."""

    config: Config
    admin: str
    life: int = 1
    supervisor: int = 0
    is_quiet: bool = False

    def line(self) -> bytes:
        """As written to stdin."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> ApiTask:
        """As read from stdin. Raises ConfigError."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the task on stdin cannot be read: {error}") from None
