"""An engine process around the fake executor, for tests: `python fake_engine.py --socket FD --page FD --epoch N`.

The configured model's name says how it behaves: "fake" works, "slow" takes 5 ms a step, "gated" never ends its fourth
step, "broken" cannot open, "crash" exits while opening, "dying" dies after some steps, "stillborn" kills itself in its
first; "stops" is stopped (SIGSTOP) in its first step in the first epoch, "stops_later" in the second, "stops_large" in
its first step of more than 16 tokens in the first; the warm-up of "cold" fails; a step of "lost_device" fails in the
first epoch as torch fails once a CUDA context is lost; "on_device" says that it is on CUDA. A request whose
id begins with "poison" kills the process in any of its steps; one with a grammar, if its id begins with "venom", while
that is built.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.engine.fakes import VOCAB_SIZE, GatedExecutor, make_limits, make_text, open_fake  # noqa: E402

from octavo.config import Config  # noqa: E402  the path comes first
from octavo.core.plan import StepPlan  # noqa: E402
from octavo.core.request import Request  # noqa: E402
from octavo.core.scheduler import Scheduler  # noqa: E402
from octavo.engine.loop import EngineLoop  # noqa: E402
from octavo.engine.observation import observe_engine  # noqa: E402
from octavo.engine.process_side import run_engine_process  # noqa: E402
from octavo.errors import CapacityError, EngineDeadError, InvalidRequestError, RequestError  # noqa: E402
from octavo.executors.protocol import Capacity  # noqa: E402
from octavo.grammar.bank import GrammarBank  # noqa: E402
from octavo.grammar.matcher import Matcher  # noqa: E402
from octavo.grammar.vocabulary import Vocabulary  # noqa: E402

SLOW_STEP_S = 0.005
EPOCH = int(sys.argv[sys.argv.index("--epoch") + 1])


def open_engine(config: Config) -> tuple[EngineLoop, Capacity]:
    behaviour = config.model.model
    if behaviour == "broken":
        raise CapacityError("the pool holds nothing")
    if behaviour == "crash":
        os._exit(9)
    device_error = lost_device() if behaviour == "lost_device" else None  # imports torch, which may take seconds
    executor, limits = GatedExecutor(), make_limits()
    capacity = replace(open_fake(executor, limits), device="cuda" if behaviour == "on_device" else "cpu")
    if behaviour == "gated":
        executor.shut_after = 4

    stops_above = {("stops", 1): 0, ("stops_later", 2): 0, ("stops_large", 1): 16}.get((behaviour, EPOCH))

    def fail(plan: StepPlan, owners: list[str]) -> Exception | None:
        if behaviour == "stillborn" or any(name.startswith("poison") for name in owners):
            os.kill(os.getpid(), signal.SIGKILL)
        if stops_above is not None and plan.num_query_tokens > stops_above:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60.0)  # this thread may not stop at once, and goes on while its stacks are written
        if behaviour == "slow":
            time.sleep(SLOW_STEP_S)
        if device_error is not None and EPOCH == 1 and plan.step > 8:
            return device_error
        return EngineDeadError("the device is gone") if behaviour == "dying" and plan.step > 8 else None

    executor.fail = fail
    scheduler = Scheduler(limits)
    loop = EngineLoop(scheduler, executor, bank=DeadlyBank())
    observe_engine(loop, scheduler, config.statistics)
    if behaviour == "cold":
        loop.warm_up = fail_to_warm_up
    return loop, capacity


def lost_device() -> Exception:
    """What an executor makes of torch's error."""
    import torch

    from octavo.executors.device import raise_typed

    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nhelp")
    try:
        raise_typed(error, torch.device("cuda"))
    except EngineDeadError as typed:
        return typed
    return error


def fail_to_warm_up() -> dict[int, float]:
    raise RuntimeError("no kernel for this")


class DeadlyBank(GrammarBank):
    """Builds nothing, and dies of some."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(lambda: make_text().tokenizer, VOCAB_SIZE))

    def _prepare(self, request: Request, done: Callable[[Matcher | RequestError], None]) -> None:
        if request.request_id.startswith("venom"):
            os.kill(os.getpid(), signal.SIGKILL)
        done(InvalidRequestError("no grammars here", "grammar"))


if __name__ == "__main__":
    assert "torch" not in sys.modules
    sys.exit(run_engine_process(open_engine))
