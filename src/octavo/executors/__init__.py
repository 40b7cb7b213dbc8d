"""Executors run the scheduler's plans; see octavo.executors.protocol. This module does not load torch."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 20_000


def limit_spinning() -> None:
    """Let OpenMP threads spin for some 100 us at a barrier, then sleep. Call this before torch is imported.

    libgomp spins for 300,000 rounds by default, which is several ms. As soon as another process needs a core, the
    spinning threads take CPU time from the thread that they wait for. Measured on workload A with two cores, in output
    tokens/s: 497 with 5,000 rounds, 500 with 1,000, and 115 with the default while another process took part of a
    core. Spinning longer costs little, because a step has two parallel regions rather than hundreds, and it covers the
    host's work between steps at batch 1: with 2,000 rounds, waking the threads made a tenth of the steps twice as long.
    If the user has set GOMP_SPINCOUNT or OMP_WAIT_POLICY, this function changes nothing.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
