"""The records of files and batches.

Owns: the two records, their form in OpenAI's API, the states of a batch.
Does not: read or write anything.
Format: https://platform.openai.com/docs/api-reference/files/object and batch/object.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.batches.runner import Counts

PENDING = ("validating", "in_progress", "finalizing", "cancelling")


class FileRecord(msgspec.Struct):
    """A file of a tenant. Times are whole seconds since 1970; `expires_at` None means the server's own age bound."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return it as clients see it."""
        made: dict[str, Any] = {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }
        return made if self.expires_at is None else {**made, "expires_at": self.expires_at}


class LineError(msgspec.Struct):
    """The error of a batch, or of one line of its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct):
    """A batch. `holder` names the key whose requests it makes; `output_id`, `error_id` are files once it is over."""

    id: str
    tenant: str
    holder: str
    endpoint: str
    input_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    status: str = "validating"
    total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_keep_s: int | None = None
    metadata: dict[str, str] | None = None
    errors: list[LineError] = []
    times: dict[str, int] = {}
    has_output: bool = False
    has_errors: bool = False
    paused: LineError | None = None  # why it waits; None while it runs

    @property
    def is_pending(self) -> bool:
        """Return True until it has ended."""
        return self.status in PENDING

    def count(self, counts: Counts) -> None:
        """Copy its run's progress."""
        self.num_completed, self.num_failed = counts.num_completed, counts.num_failed

    def shown(self) -> dict[str, Any]:
        """Return it as clients see it."""
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        listed = [msgspec.to_builtins(error) for error in (*self.errors, self.paused) if error is not None]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": listed} if listed else None,
            "input_file_id": self.input_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{moment}_at": self.times.get(moment) for moment in moments},
            "request_counts": {"total": self.total, "completed": self.num_completed, "failed": self.num_failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata,
        }
