"""An engine process whose steps take a fixed time: `python timed_engine.py --socket FD --page FD --epoch N`.

The configured model's name is the milliseconds of a step; slots and pool are the configuration's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.config import Config  # noqa: E402  the path comes first
from octavo.core.limits import Limits  # noqa: E402
from octavo.core.plan import StepPlan, StepResult  # noqa: E402
from octavo.core.scheduler import Scheduler  # noqa: E402
from octavo.engine.loop import EngineLoop  # noqa: E402
from octavo.engine.process_side import run_engine_process  # noqa: E402
from octavo.executors.protocol import Capacity, ExecutorSpec  # noqa: E402
from tests.fake_model import FakeExecutor  # noqa: E402

VOCAB = 258
MAX_LEN = 4096
BLOCK = 16


class TimedExecutor(FakeExecutor):
    """A step ends `step_s` after it was submitted, however little there was to do."""

    def __init__(self, step_s: float) -> None:
        super().__init__(vocab_size=VOCAB, max_model_len=MAX_LEN, strict=False)
        self._step_s = step_s
        self._due = 0.0

    def submit(self, plan: StepPlan) -> Any:
        self._due = time.monotonic() + self._step_s
        return super().submit(plan)

    def collect(self, ticket: object) -> StepResult:
        time.sleep(max(0.0, self._due - time.monotonic()))
        return super().collect(ticket)


def open_engine(config: Config) -> tuple[EngineLoop, Capacity]:
    executor = TimedExecutor(float(config.model.model) / 1000)
    slots, blocks = config.scheduling.max_sequences or 8, config.cache.num_blocks or 4096
    limits = Limits(
        block_size=BLOCK,
        num_blocks=(blocks,),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        max_batch_tokens=2048,
        max_sequences=slots,
    )
    capacity = executor.open(ExecutorSpec(slots, limits.max_batch_tokens, BLOCK, num_blocks=blocks))
    return EngineLoop(Scheduler(limits), executor), capacity


if __name__ == "__main__":
    sys.exit(run_engine_process(open_engine))
