"""An engine process whose first epoch has a rank that misbehaves: FILE does not exist yet, and the rank makes it.

`python ranked_engine.py KIND FILE` is an engine process for EngineSupervisor, and with `--rank` first one of its ranks.
KIND is "tampered" (a digest is changed at step 30), "refused" (the rank does not open) or "memory" (once, it has too
little memory for a prompt).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo import assembly  # noqa: E402  the path comes first
from octavo.engine.process_side import run_engine_process  # noqa: E402
from octavo.errors import CapacityError  # noqa: E402
from octavo.executors.ranks import frames  # noqa: E402
from octavo.executors.ranks.frames import Begin, Done  # noqa: E402
from octavo.executors.ranks.group import RankGroup  # noqa: E402
from octavo.executors.ranks.process import OwnRank  # noqa: E402

TAMPERED_STEP = 30


class TamperedDone(Done):
    def pack(self) -> bytes:
        digest = b"?" * frames.DIGEST_BYTES if self.step == TAMPERED_STEP else self.digest
        return Done(self.step, self.seconds, digest).pack()


def refuse(begin: Begin, store: object = None) -> OwnRank:
    raise CapacityError("the pool holds nothing")


def lack_memory(file: str) -> None:
    from octavo.executors.torch_executor import TorchExecutor

    has_memory = TorchExecutor._has_memory

    def look(self: TorchExecutor, inputs: Any) -> bool:
        if inputs.attention[0].num_tokens < 100 or Path(file).exists():
            return has_memory(self, inputs)
        Path(file).touch()
        return False

    TorchExecutor._has_memory = look  # type: ignore[method-assign]


def main() -> int:
    is_rank = sys.argv[1] == "--rank"
    kind, file, *rest = sys.argv[2:] if is_rank else sys.argv[1:]
    if not is_rank:
        command = (sys.executable, __file__, "--rank", kind, file)
        assembly.RankGroup = partial(RankGroup, command=command)  # type: ignore[misc, assignment]
        return run_engine_process(partial(assembly.open_engine, is_own_process=True), rest)
    if kind == "memory":
        lack_memory(file)
    elif not Path(file).exists():
        Path(file).touch()
        if kind == "tampered":
            frames.Done = TamperedDone  # type: ignore[misc]
        else:
            assembly.make_rank = refuse
    return assembly.rank_main(rest)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
