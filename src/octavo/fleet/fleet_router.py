"""FleetRouter: chooses an engine for each request of a fleet that serves, by one of the routers that simulations use.

Owns: what a router is shown of a request, and the log of its choices. Does not: know engines, count their load, or send
requests (the front end's ledger does), or choose (fleet.routing does).
Invariant: a router's choices depend only on the calls of `choose`: the requests and the engines at each.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from octavo.config import Config
from octavo.core.kv.prefix import prompt_keys
from octavo.core.request import Request
from octavo.fleet.routing import ROUTERS, RoutedPrompt, RouterTarget, create_router
from octavo.fleet.routing_log import RoutingHeader, RoutingLog

DEFAULT_ROUTER = "prefix_affinity"
_Target = TypeVar("_Target", bound=RouterTarget)
_number = attrgetter("number")


class FleetRouter:
    """Chooses one of several engines for each request.

    `block_size` is the engines'. With a log, the router is shown what the log has: keys, session and tenant as digests
    under the log's secret. So a replay of the log makes the same choices.
    """

    def __init__(
        self, name: str = DEFAULT_ROUTER, block_size: int = 16, seed: int = 0, log: RoutingLog | None = None
    ) -> None:
        """Raises ConfigError if there is no router of that name."""
        self.name = name
        self._router = create_router(name, seed)
        self._block_size = block_size
        self._log = log

    @classmethod
    def from_config(cls, config: Config, name: str = DEFAULT_ROUTER) -> FleetRouter:
        """Return a new router; with --record, its log is in that folder. Raises ConfigError."""
        folder, size, log = config.recording.record, config.cache.block_size, None
        if name in ROUTERS and folder is not None:
            header = RoutingHeader(name, 0, size, time.time())
            log = RoutingLog(Path(folder).expanduser().absolute(), config.recording.record_bytes, header)
            atexit.register(log.close)
        return cls(name, size, log=log)

    def choose(self, request: Request, targets: Sequence[_Target]) -> _Target:
        """Return one of these engines, of which there is at least one, for a new, moved or resumed request.

        The keys of the prompt are those that the front end made for the engine's prefix cache. If there are none, and
        there is a choice to make or to log, they are computed here: 0.3 ms for 8,192 tokens.
        """
        keys = request.block_keys
        if keys is None:
            is_needed = len(targets) > 1 or self._log is not None
            keys = prompt_keys(request, self._block_size) if is_needed else ()
        prompt = RoutedPrompt(keys, request.num_prompt_tokens, request.session, request.tenant)
        if self._log is not None:
            prompt = self._log.mask(prompt)
        number = self._router.choose(prompt, sorted(targets, key=_number)).number
        if self._log is not None:
            self._log.chosen(request, prompt, targets, number)
        return next(target for target in targets if target.number == number)

    def ended(self, request_id: str, num_output_tokens: int, first_at: float | None) -> None:
        """Log the end of a request, with the tokens of all its choices, and the time of the first one."""
        if self._log is not None:
            self._log.ended(request_id, num_output_tokens, first_at)

    def close(self) -> None:
        """End the log."""
        if self._log is not None:
            self._log.close()
