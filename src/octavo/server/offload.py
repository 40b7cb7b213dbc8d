"""The threads on which large inputs are read, so that the event loop does not wait for them.

Owns: how many there are. Does not: know what is read.
Two: what they run either releases the interpreter's lock (tokenizing) or takes turns with the loop every few
milliseconds, and each more thread would make the loop wait for one more turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="octavo-inputs")  # none is started before its first work


async def off_loop(work: Callable[[], T]) -> T:
    """Do the work on one of the threads. A caller that is cancelled leaves it to end by itself."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
