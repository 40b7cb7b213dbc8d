"""The engine process's side of the connection to its client.

Owns: reading commands and writing reports; the thread that writes. Does not: define frames (wire does), or decide.
Invariants: a malformed frame, or a frame of another epoch, is dropped and counted. A length above the cap ends the
connection. The end of the connection ends the engine.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from functools import partial
from queue import SimpleQueue

from octavo.core.plan import Events
from octavo.core.request import FinishError, FinishReason
from octavo.engine import wire
from octavo.engine.client import Accepted, finished
from octavo.engine.loop import EngineLoop
from octavo.errors import EngineDeadError, EngineError, ErrorKind, RequestError
from octavo.executors.protocol import Capacity

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 18
MAX_LOGGED_DROPS = 20  # dropped frames that are logged; all are counted


class EngineServer:
    """Serves one EngineLoop to one client. Create the server before the engine is loaded."""

    def __init__(self, connection: socket.socket, epoch: int) -> None:
        self.epoch = epoch
        self.num_malformed = 0
        self.num_stale = 0  # frames of another epoch
        self._connection = connection
        self._outgoing: SimpleQueue[wire.FromEngine | Events | None] = SimpleQueue()  # None ends the writer
        self._send(wire.Starting(epoch))
        self._writer = threading.Thread(target=self._write_all, name="octavo-writer", daemon=True)
        self._writer.start()

    def fail(self, error: BaseException) -> None:
        """Tell the client that the engine cannot start."""
        self._send(wire.ErrorReply.of(self.epoch, error))

    def serve(self, engine: EngineLoop, capacity: Capacity) -> None:
        """Start the engine, send Ready, and run commands until the connection ends; then stop the engine."""
        engine.attach(partial(self._deliver, engine), partial(self._engine_ended, engine))
        engine.start()
        if engine.wait_warm():
            self._send(wire.Ready(self.epoch, wire.VERSION, capacity))
        splitter = wire.FrameSplitter()
        try:
            while data := self._connection.recv(_READ_BYTES):
                for body in splitter.feed(data):
                    if not self._handle(engine, body):
                        return
        except (OSError, wire.WireError) as error:
            _LOG.warning("the connection to the engine ended: %s", error)
        finally:
            engine.stop()
            engine.join()

    def close(self) -> None:
        """Send what is pending, then close. Idempotent."""
        self._send(None)
        self._writer.join(5.0)
        self._connection.close()

    def _handle(self, engine: EngineLoop, body: bytes) -> bool:
        """Handle one frame; return False if it was the last."""
        try:
            message = wire.decode_to_engine(body)
        except wire.WireError as error:
            return self._drop(error)
        if message.epoch != self.epoch:
            self.num_stale += 1
            return True
        if isinstance(message, wire.Submit):
            try:
                request = message.request()
            except RequestError as error:
                self._reply(message.request_id, error)
                return True
            except (wire.WireError, ValueError, OverflowError) as error:
                return self._drop(error)
            engine.submit(request, partial(self._reply, request.request_id), message.media)
        elif isinstance(message, wire.CancelRequests):
            engine.cancel(message.request_ids, message.reason, message.choice)
        elif isinstance(message, wire.ControlRequest):
            engine.control(message.verb, message.argument, partial(self._reply, message.number))
        return not isinstance(message, wire.Close)

    def _drop(self, error: Exception) -> bool:
        self.num_malformed += 1
        if self.num_malformed <= MAX_LOGGED_DROPS:
            _LOG.warning("a frame was dropped: %s", error)
        return True

    def _deliver(self, engine: EngineLoop, events: Events) -> None:
        """Send events, in the engine's thread. A failed loop's ends are not sent, so that the client resumes them."""
        if engine.failure is None:
            self._send(events)

    def _engine_ended(self, engine: EngineLoop) -> None:
        """Send why the engine failed, if it did, and stop reading, so that the process ends. In the engine's thread."""
        if engine.failure is not None:
            self._send(wire.ErrorReply.of(self.epoch, EngineDeadError(engine.failure)))
        with contextlib.suppress(OSError):  # the client has closed the connection
            self._connection.shutdown(socket.SHUT_RD)

    def _reply(self, to: wire.ReplyTo, value: object) -> None:
        """Answer a Submit or a ControlRequest."""
        if isinstance(value, Exception):
            self._send(wire.ErrorReply.of(self.epoch, value, to))
        elif isinstance(value, Accepted):
            self._send(wire.SubmitReply(self.epoch, value))
        else:
            self._send(wire.ControlReply(self.epoch, to, value))

    def _send(self, message: wire.FromEngine | Events | None) -> None:
        """Queue a message for the writer, from any thread. The outputs of open requests bound the queue's size."""
        self._outgoing.put(message)

    def _write_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.sendall(self._encode(message))
            except OSError as error:  # the client has ended; the reader sees this too and stops the engine
                _LOG.warning("the engine cannot write to its client: %s", error)
                break
            except Exception:  # the shell: end the connection rather than leave the front end waiting
                _LOG.exception("the engine cannot write to its client")
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                break

    def _encode(self, message: wire.FromEngine | Events) -> bytes:
        if isinstance(message, wire.ControlReply):
            try:
                return wire.frame(message)
            except (wire.WireError, TypeError, ValueError, OverflowError) as error:
                failed = EngineError(f"the answer cannot be sent: {error}")
                return wire.frame(wire.ErrorReply.of(self.epoch, failed, message.to))
        if not isinstance(message, Events):
            return wire.frame(message)
        try:
            return wire.frame(wire.Outputs.of(self.epoch, message))
        except wire.WireError as error:  # one step's log-probabilities exceed the size cap: their requests end
            ids = dict.fromkeys((*message.request_ids, *(name for name, *_ in message.scores)))
            failure = FinishError(ErrorKind.ENGINE, str(error))
            ends = tuple(finished(name, FinishReason.ERROR, failure, time=message.time) for name in ids)
            known = tuple(event for event in message.decisions if event.request_id not in ids)
            return wire.frame(wire.Outputs.of(self.epoch, Events(message.step, message.time, decisions=known + ends)))
