"""Write docs/errors.md from the table of error codes.

Owns: the page's form. Does not: hold a code (octavo.server.error_codes does).
Usage: python tools/errors.py [--check]
"""

import sys
from pathlib import Path

from octavo.server.error_codes import CODES
from octavo.server.faults import ApiError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
HEAD = """# Errors

Made by `tools/errors.py` from `octavo.server.error_codes`; `make docs` makes it again.

Every refusal and failure has OpenAI's form: `{"error": {"message", "type", "param", "code"}}`. `code` is for programs
and does not change; `message` is for people: it has the numbers and what to give instead. `param` is the field at fault
as the client spelled it. In the middle of a stream the same object comes as a `data:` event, then `[DONE]`.

Headers: `Retry-After` (whole seconds, at least 1) on every 429 and 503; `x-should-retry: false` where the same request
would fail again. Validation is 400, never 422.

| status | code | meaning | type | retry | Python |
|---|---|---|---|---|---|
"""


def render() -> str:
    """The page."""
    rows = []
    for code, entry in CODES.items():
        error = ApiError((entry.statuses or (500,))[0], "", code=code)
        shown = ", ".join(map(str, entry.statuses)) or "-"
        kind = error.body()["error"]["type"] if entry.statuses else "-"
        retry = "no" if error.is_final or code == "engine_crash_suspect" else "yes"
        raised = f"`{entry.raised.__name__}`" if entry.raised is not None else ""
        rows.append(
            f"| {shown} | `{code}` | {entry.meaning} | {kind} | {retry if entry.statuses else '-'} | {raised} |"
        )
    return HEAD + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page; with --check only compare, and return 1 where it is out of date."""
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == render() else 1
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
