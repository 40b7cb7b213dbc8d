"""The application around an engine of this process, without a port: it answers the lines of files.

Owns: putting it together and ending it, engine and sandbox process included. Does not: read or write lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octavo.assembly import LocalEngine
from octavo.config import Config
from octavo.server.api.batches.run import InnerCall, inner_call
from octavo.server.app import create_app
from octavo.server.http.keys import ANONYMOUS


@asynccontextmanager
async def answering(engine: LocalEngine, config: Config) -> AsyncIterator[InnerCall]:
    """Yield the function that posts to the application; at the end close the sandbox process and the engine."""
    try:
        app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
        try:
            yield inner_call(app, ANONYMOUS)
        finally:
            await app.state.context.sandbox.close()
    finally:
        await engine.client.close()
