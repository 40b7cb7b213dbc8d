"""What the api process of `octavo fleet --standby-of` does until it serves: follow the front, and refuse requests.

Owns: the order: lock the journal's folder, answer 503, follow, take over. Does not: copy the journal (fleet.standby
does). Only a standby loads this module.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.server_registry import run_folder
from octavo.cli.terminal import say
from octavo.fleet.security import LinkSecurity, parse_address
from octavo.fleet.standby import StandbyFront
from octavo.frontend.api_supervisor import READY
from octavo.frontend.journal import journal_name
from octavo.frontend.journal_files import lock_folder
from octavo.server.http.lifecycle import answering_unready
from octavo.server.http.listener import url_of

if TYPE_CHECKING:
    from octavo.cli.api_process import ApiProcess


async def follow_front(api: ApiProcess) -> int:
    """Follow the front of --standby-of until it is gone; return the term to serve with. Raises ConfigError."""
    config = api.task.config
    assert config.retry.journal is not None and config.fleet.standby_of is not None, "octavo fleet checks this"
    folder = Path(config.retry.journal)
    front = parse_address(config.fleet.standby_of, "--standby-of")
    security = LinkSecurity.of(config.link, run_folder())
    lock = lock_folder(folder, "--journal")
    standby = StandbyFront(folder, journal_name(config, has_several=len(api.task.models) > 1), front, say)
    why = "this is a standby: it serves once its front is gone; send the request to the front"
    try:
        async with answering_unready(api.listener, "standby", why):
            api.report(READY)
            say(
                f"standby   of the front at {front}; {url_of(api.listener, config.web)} answers 503 until it takes over"
            )
            term = await standby.run(security, config.fleet.takeover_after_s)
    finally:
        os.close(lock)
    say(f"standby   takes over from the front at {front} with term {term}")
    return term
