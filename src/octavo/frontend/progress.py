"""The progress bar of a batch, on the terminal's error stream.

Owns: the line's contents. Does not: decide whether there is a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.frontend.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput


@contextmanager
def batch_bar(total: int) -> Iterator[Callable[[RequestOutput | EmbeddingOutput | ClassificationOutput], None]]:
    """Show finished answers, remaining time, and tokens per second; yield a function for answers, in any thread."""
    started_at, num_in, num_out = time.monotonic(), 0, 0
    columns = "generating", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()

    def advance(output: RequestOutput | EmbeddingOutput | ClassificationOutput) -> None:
        nonlocal num_in, num_out
        num_in += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            num_out += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.monotonic() - started_at, 1e-6)
        progress.update(task, advance=1, rate=f"{num_in / seconds:.0f} in, {num_out / seconds:.0f} out tokens/s")

    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, rate="")
        yield advance
