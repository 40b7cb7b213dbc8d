"""Write docs/errors.md from the table of error codes.

Owns: the page's layout. Does not: define codes (octavo.server.http.errors does).
Usage: python tools/errors.py [--check]
"""

import sys
from pathlib import Path

from octavo.server.http.errors import CODES, ApiError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
HEAD = """# Errors

This page lists every error code of the server: its status, its meaning, and whether a retry can succeed.
`tools/errors.py` generates it from `octavo.server.http.errors` (`make docs`).

Errors have OpenAI's form: `{"error": {"message", "type", "param", "code"}}`. `code` is for programs and does not
change. `message` is for people and has the numbers and the remedy. `param` is the field at fault, as the client
spelled it. During a stream, the same object is sent as a `data:` event, followed by `[DONE]`. Anthropic's and
Ollama's endpoints, and streams of `/v1/responses`, use the forms of those [APIs](apis.md).

Every 429 and 503 has `Retry-After`, in whole seconds of at least 1. If the same request would fail again, the answer
has `x-should-retry: false`. Invalid fields are 400, never 422. The column "Python" names the exception of
`octavo.errors`.

| status | code | meaning | type | retry | Python |
|---|---|---|---|---|---|
"""


def render() -> str:
    """Return the page."""
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
    """Write the page; with --check only compare, and return 1 if the page is out of date."""
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == render() else 1
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
