"""An agent around a fake engine, for tests: `python agent_child.py TOKEN BEHAVIOUR FRONT...` joins one at HOST:PORT.

It prints its lines, and the pid of its engine whenever one is ready.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.config import Config, ModelConfig  # noqa: E402  the path comes first
from octavo.engine.parent import end_with_parent  # noqa: E402
from octavo.fleet.agent import Agent  # noqa: E402
from octavo.fleet.security import LinkSecurity, parse_address  # noqa: E402

COMMAND = (sys.executable, str(ROOT / "tests" / "frontend" / "fake_engine.py"))


async def main() -> None:
    token, behaviour, *fronts = sys.argv[1:]
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory() as folder:
        security = LinkSecurity(Path(folder), token.encode())
        agent = Agent(
            Config(model=ModelConfig(model=behaviour)), security, lambda line: print(line, flush=True), COMMAND
        )
        await agent.run_joining([parse_address(front, "FRONT") for front in fronts])


if __name__ == "__main__":
    end_with_parent()
    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        sys.exit(0)
