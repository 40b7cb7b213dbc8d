"""Custody: the open requests of a front end while engines come and go under them.

Owns: the ledger's channels, who is sent to which engine, submits that wait for an answer, ends that no engine gives.
Does not: start, watch or end engines (see keeper), or talk HTTP.
Invariants: a submit is answered once; a request that was cancelled, or whose time is over, is sent to no other engine;
a resume that an engine refuses ends that request, and no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable
from functools import partial

from octavo.core.plan import Events
from octavo.core.request import FinishError, FinishReason, Request
from octavo.engine.client import Accepted, TokenOutput
from octavo.errors import EngineDeadError, ErrorKind, OctavoError, kind_of
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.open_requests import LedgerObserver, OpenRequests
from octavo.frontend.quarantine import CONVICTED, Quarantine
from octavo.frontend.socket_client import SocketClient

_LOG = logging.getLogger(__name__)


class Custody:
    """Keeps requests; `client` is the engine in force, None while there is none."""

    def __init__(self, observer: LedgerObserver | None = None) -> None:
        self.ledger = OpenRequests(observer=observer)
        self.client: SocketClient | None = None
        self.num_resumed = 0
        self.num_convicted = 0
        self._quarantine = Quarantine()
        self._submits: dict[str, asyncio.Future[Accepted]] = {}

    @property
    def is_holding(self) -> bool:
        """Whether some requests wait while another is tried alone."""
        return self._quarantine.is_holding

    # --- requests come, are read, and go

    async def submit(self, request: Request) -> Accepted:
        """Record a request, send it, and wait for the engine's answer: that of a later one, if need be.

        Raises RequestError; EngineDeadError when there will be no engine.
        """
        entry = self.ledger.add(request)
        name = request.request_id
        self._quarantine.settled(name)  # an earlier request of this id may have been in a crash
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._submits[name] = accepted
        try:
            self._send_or_hold(entry)
            return await accepted
        except BaseException:
            if self.ledger.get(name) is entry:
                if self.client is not None and not self._quarantine.is_held(name):
                    self.client.post_cancel((name,))
                self.ledger.forget(name)
                self._settled(name)
            raise
        finally:
            if self._submits.get(name) is accepted:
                del self._submits[name]

    def outputs(self, request_id: str, final_only: bool = False) -> AsyncIterator[TokenOutput]:
        """Outputs of an accepted request, across engines."""
        return self.ledger.outputs(request_id, final_only)

    def cancel(self, request_ids: Iterable[str], reason: FinishReason, choice: int | None = None) -> int:
        """End requests, or one choice of them: at once where no engine has them. Returns how many are open here."""
        sent, count = [], 0
        for name in tuple(request_ids):
            entry = self.ledger.get_open(name)
            if entry is None:
                continue
            count += 1
            if self.client is None or self._quarantine.is_held(name):
                self.end(name, reason, choice=choice)
            else:
                entry.requested_ends.setdefault(choice, reason)  # the engine may die before it hears of it
                sent.append(name)
        if sent and self.client is not None:
            self.client.post_cancel(sent, reason, choice)
        return count

    def restore(self, entries: Iterable[OpenRequest]) -> None:
        """Put back requests of an earlier front end, ended ones too, and resume the others."""
        for entry in entries:
            self.ledger.restore(entry)
            if entry.end is None:
                self._send_or_hold(entry)

    def deliver(self, epoch: int, events: Events) -> None:
        """Take in what an engine sent."""
        self.ledger.accept(epoch, events)
        if self._quarantine.is_holding:
            self._go_on()

    def end(self, name: str, reason: FinishReason, error: FinishError | None = None, choice: int | None = None) -> None:
        """End a request here, or one choice of it; no engine will."""
        entry = self.ledger.get_open(name)
        if entry is None:
            return
        self.ledger.end(name, reason, error, choice)
        if entry.end is not None:
            accepted = Accepted(name, entry.max_tokens or entry.request.params.max_tokens or 1, capped=False)
            _settle(self._submits.get(name), accepted)
            self._settled(name)

    def end_all(self, reason: FinishReason, refusal: OctavoError) -> None:
        """End everybody; submits that were never answered are refused."""
        for waiting in self._submits.values():
            _settle(waiting, refusal)
        self.ledger.end_all(reason, FinishError(kind_of(refusal), str(refusal)))

    def expire(self, now: float) -> None:
        """End those whose time is over and that no engine has."""
        for entry in self.ledger:
            request, name = entry.request, entry.request.request_id
            if self.client is not None and not self._quarantine.is_held(name):
                continue
            if request.deadline is not None and now >= request.deadline:
                late_s = now - request.deadline
                error = FinishError(ErrorKind.DEADLINE, f"deadline passed {late_s:.3f} s ago")
                self.end(name, FinishReason.TIMEOUT, error)
            elif entry.queue_s is None and now >= request.arrival + (request.queue_timeout or math.inf):
                what = f"queue_timeout of {request.queue_timeout} s passed before the request could start"
                self.end(name, FinishReason.TIMEOUT, FinishError(ErrorKind.QUEUE_TIMEOUT, what))

    def explain(self, name: str, has_engine: bool) -> dict[str, object] | None:
        """What is told of an open request that no engine has; None where one has it, or nobody knows it."""
        entry = self.ledger.get_open(name)
        if entry is None or (has_engine and not self._quarantine.is_held(name)):
            return None
        why = "the engine is being restarted"
        if has_engine:
            why = "an engine died, and what may have been the cause is tried alone first"
        outputs = sum(len(page.ids) for page in entry.pages.values())
        told = {"id": name, "state": "held", "tenant": entry.request.tenant, "num_outputs": outputs}
        return {**told, "text": f"{name} waits: {why}", "public_text": f"waits: {why}"}

    def with_epochs(self, answer: object) -> object:
        """An explanation with the number of the engine's life, and of the one in which its request came."""
        if not isinstance(answer, dict) or "text" not in answer:
            return answer
        epoch, entry = self.ledger.epoch, self.ledger.get(answer["id"])
        begun = None if entry is None else entry.epoch
        lives = {"epoch": epoch, "begun_in_epoch": begun, "num_resumes": None if begun is None else epoch - begun}
        if begun is None or begun == epoch or answer["state"] == "held":
            return answer | lives
        where = f"it came in epoch {begun}" if begun else "it came before this server's process began"
        resumed = f"; resumed by the engine of epoch {epoch}, {where}"
        return answer | lives | {key: f"{answer[key]}{resumed}" for key in ("text", "public_text")}

    # --- engines come and go

    def begin(self, client: SocketClient) -> int:
        """A new engine: its epoch begins, and everybody open is sent to it, oldest first. Returns how many they are."""
        self.client = client
        names = [state.request.request_id for state in self.ledger.begin_epoch(client.epoch)]
        self.num_resumed += len(names)
        self._quarantine.line_up(names)
        self._go_on()
        return len(names)

    def has_grammar(self, request_id: str) -> bool:
        """Whether an open request is held to one."""
        entry = self.ledger.get_open(request_id)
        return entry is not None and bool(entry.request.params.grammar)

    def bereave(self, batch: Iterable[str]) -> None:
        """The engine is gone, with these in its batch. Convict, and end what was to be ended."""
        self.client = None
        for entry in self.ledger:
            if entry.has_progress:
                self._quarantine.settled(entry.request.request_id)
        found = [self.ledger.get_open(name) for name in batch]
        stuck = [each.request.request_id for each in found if each is not None and not each.has_progress]
        for name in self._quarantine.crashed(stuck):
            self.num_convicted += 1
            _LOG.error("request %s ends: the last %d engines that ran it died of its step", name, CONVICTED)
            what = f"the engine died {CONVICTED} times with this request in its batch, the last time with it alone"
            self.end(name, FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, what))
        for entry in self.ledger:
            for choice, reason in tuple(entry.requested_ends.items()):
                self.end(entry.request.request_id, reason, choice=choice)
            entry.requested_ends.clear()

    def _send_or_hold(self, entry: OpenRequest) -> None:
        if self.client is not None and self._quarantine.may_go(entry.request.request_id):
            self._send(entry)

    def _go_on(self) -> None:
        """Send whoever may go now; a trial is over once the request has a token or its end."""
        while True:
            name = self._quarantine.on_trial
            if name is not None:
                entry = self.ledger.get_open(name)
                if entry is not None and not entry.has_progress:
                    return
                self._quarantine.settled(name)
            released = self._quarantine.release()
            if not released:
                return
            for name in released:
                entry = self.ledger.get_open(name)
                if entry is not None:
                    self._send(entry)

    def _send(self, entry: OpenRequest) -> None:
        """Send a request as it resumes; its answer comes later, or never when the engine dies first."""
        client, name = self.client, entry.request.request_id
        assert client is not None
        held = entry.implied_end()
        if held is not None:
            self.ledger.finish(entry, held)
            self._settled(name)
            return
        try:
            answer = client.send(entry.resumed())
        except EngineDeadError:
            return  # whoever watches it will see, and send this again to the next
        except OctavoError as error:
            self._refused(name, error)
            return
        answer.add_done_callback(partial(self._answered, name))
        if entry.has_several:  # it starts anew, and what is over here would run again
            for choice in entry.ended_choices:
                client.post_cancel((name,), FinishReason.STOP, choice)

    def _answered(self, name: str, answer: asyncio.Future[Accepted]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if isinstance(error, EngineDeadError):
            return
        if error is not None:
            self._refused(name, error)
            return
        accepted, entry = answer.result(), self.ledger.get_open(name)
        if entry is not None:
            entry.max_tokens = accepted.max_tokens
        _settle(self._submits.get(name), accepted)

    def _refused(self, name: str, error: BaseException) -> None:
        waiting = self._submits.get(name)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
            self._settled(name)
        else:
            self.end(name, FinishReason.ERROR, FinishError(kind_of(error), str(error)))

    def _settled(self, name: str) -> None:
        """Nothing holds on this request's account any more."""
        self._quarantine.settled(name)
        if self.client is not None and self._quarantine.is_holding:
            self._go_on()


def _settle(waiting: asyncio.Future[Accepted] | None, value: Accepted | OctavoError) -> None:
    if waiting is None or waiting.done():
        return
    if isinstance(value, OctavoError):
        waiting.set_exception(value)
    else:
        waiting.set_result(value)
