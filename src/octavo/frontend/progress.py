"""The progress bar of a batch, on the terminal's error stream.

Owns: what the line shows. Does not: decide whether there is a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.frontend.outputs import EmbeddingOutput, RequestOutput


class BatchBar:
    """Shows answers done, time left, and tokens per second in and out. Thread-safe."""

    def __init__(self, total: int) -> None:
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=total, rate="")
        self._begun = time.monotonic()
        self._num_in = 0
        self._num_out = 0

    def __enter__(self) -> Callable[[RequestOutput | EmbeddingOutput], None]:
        self._progress.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _advance(self, output: RequestOutput | EmbeddingOutput) -> None:
        self._num_in += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._num_out += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.monotonic() - self._begun, 1e-6)
        rate = f"{self._num_in / seconds:.0f} in, {self._num_out / seconds:.0f} out tokens/s"
        self._progress.update(self._task, advance=1, rate=rate)
