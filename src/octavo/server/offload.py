"""The threads that parse and tokenize large inputs, so that the event loop does not wait for them.

Owns: their number, and separate lanes, so that short work does not wait for long work. Does not: know the work.
Parsing holds the interpreter's lock for up to 30 ms at a time (6 MB of escapes in one string), so one thread does all
long parsing: the loop never waits for two such pieces in a row. Tokenizing releases the lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
LONG_BYTES = 512 * 1024  # of a body: a few milliseconds to parse
LONG_CHARS = 64 * 1024  # of a text: a twentieth of a second to tokenize
# No thread is started before its first work.
_PARSING = ThreadPoolExecutor(1, thread_name_prefix="octavo-bodies")
_PARSING_LONG = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-bodies")
_TOKENIZING = ThreadPoolExecutor(2, thread_name_prefix="octavo-prompts")
_TOKENIZING_LONG = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-prompts")


async def parse_off_loop(work: Callable[[], T], num_bytes: int) -> T:
    """Run work that holds the interpreter's lock. If the caller is cancelled, the work still runs to its end."""
    lane = _PARSING_LONG if num_bytes > LONG_BYTES else _PARSING
    return await asyncio.get_running_loop().run_in_executor(lane, work)


async def off_loop(work: Callable[[], T], num_characters: int = 0) -> T:
    """Run work that mostly releases the interpreter's lock. If the caller is cancelled, the work still ends."""
    lane = _TOKENIZING_LONG if num_characters > LONG_CHARS else _TOKENIZING
    return await asyncio.get_running_loop().run_in_executor(lane, work)
