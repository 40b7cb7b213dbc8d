"""The threads on which large inputs are read, so that the event loop does not wait for them.

Owns: how many there are. Does not: know what is read.
Parsing keeps the interpreter's lock for up to 30 ms at a time (6 MB of escapes in one string), so one thread does it:
the loop never waits for two such pieces in a row. Tokenizing releases the lock; two threads do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
# No thread is started before its first work.
_PARSING = ThreadPoolExecutor(1, thread_name_prefix="octavo-bodies")
_TOKENIZING = ThreadPoolExecutor(2, thread_name_prefix="octavo-prompts")


async def parse_off_loop(work: Callable[[], T]) -> T:
    """Do work that keeps the interpreter's lock. A caller that is cancelled leaves it to end by itself."""
    return await asyncio.get_running_loop().run_in_executor(_PARSING, work)


async def off_loop(work: Callable[[], T]) -> T:
    """Do work that mostly releases the interpreter's lock. A caller that is cancelled leaves it to end by itself."""
    return await asyncio.get_running_loop().run_in_executor(_TOKENIZING, work)
