"""Executors run the scheduler's plans; see octavo.executors.protocol. This module does not load torch."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 20_000


def limit_spinning() -> None:
    """Let OpenMP threads spin for some 100 us at a barrier, then sleep; call before torch is imported.

    libgomp's default is 300,000 rounds, several ms: as soon as another process needs a core, spinning threads take
    the CPU time of the thread that they wait for. (Measured, workload A on two cores, output tokens/s: 497 with
    5,000 and 500 with 1,000; 115 with the default while another process took part of a core. Since a step has two
    parallel regions and not hundreds, spinning longer costs little, and covers the host's work between steps at batch
    1: with 2,000, waking the threads made a tenth of the steps twice as long.)
    A choice made by the user (GOMP_SPINCOUNT, OMP_WAIT_POLICY) is kept.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
