"""Runs one engine inside its own environment, and times requests there. Stand-alone: imports nothing of Octavo.

Usage: PYTHON host.py ENGINE_FILE OPTIONS_JSON. ENGINE_FILE is a file beside this one. Its class ENGINE(options) has
`facts` and run(requests, at_once), which returns [seconds to the first token, seconds to the last, tokens] a request.
Owns: the lines of JSON on stdin (requests) and stdout (answers); what an engine itself prints goes to stderr.
Invariant: the failure of an engine is reported in a line with `error`, and ends the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def load_engine(path: Path) -> Any:
    """Return the class that a file names ENGINE."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.ENGINE


def main() -> None:
    """Open the engine, report that, then answer each line until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**told: Any) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    try:
        engine = load_engine(Path(sys.argv[1]))(json.loads(sys.argv[2]))
        say(ready=True, facts=engine.facts)
        for line in sys.stdin:
            asked = json.loads(line)
            begun = time.perf_counter()
            requests = engine.run(asked["requests"], asked["at_once"])
            say(seconds=time.perf_counter() - begun, requests=requests)
    except Exception as error:  # process boundary: report any exception of another engine
        say(error=f"{type(error).__name__}: {error}"[:2000])
        os._exit(1)
    os._exit(0)  # engines' background threads do not always end


if __name__ == "__main__":
    main()
