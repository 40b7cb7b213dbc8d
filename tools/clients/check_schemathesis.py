"""schemathesis over /openapi.json: bodies that fit the schemas and bodies that do not; no answer is a 5xx."""

import os
import sys
from typing import Any

import hypothesis
import schemathesis
from checking import URL, report
from hypothesis import HealthCheck, settings
from schemathesis.generation import GenerationMode

CLIENT = "schemathesis"
PACKAGES = ["schemathesis"]
FUZZ = True
SERVER = ["--model", "scripted:schemathesis.yaml", "--max-queue-time", "20"]
EXAMPLES = int(os.environ.get("CHECK_EXAMPLES", "40"))  # of each operation and mode


# What holds an answer to a text that is not the script's; it fails a request whose grammar it cannot follow.
UNSCRIPTED = ("guided_choice", "guided_regex", "guided_grammar", "choice", "regex", "grammar")


def tame(value: Any, mode: GenerationMode) -> Any:
    """The body without what only costs time (an answer as long as the context), or what the script cannot answer."""
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("max_tokens"), int) and value["max_tokens"] > 64:
        value["max_tokens"] = 64
    if mode is GenerationMode.POSITIVE:
        for part in (value, value.get("structured_outputs")):
            for name in UNSCRIPTED if isinstance(part, dict) else ():
                part.pop(name, None)
    return value


def ask_all(operation: Any, mode: GenerationMode) -> dict[int, int]:
    """Ask one operation; how many answers there were of each status. Raises AssertionError at a 5xx."""
    seen: dict[int, int] = {}

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        tame(case.body, mode)
        answer = case.call(timeout=60)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        is_declared = answer.status_code in (501, 503) and b'"code"' in answer.content
        assert answer.status_code < 500 or is_declared, f"{answer.status_code}: {answer.text[:200]}"

    ask()
    return seen


def main() -> int:
    """One line an operation and mode."""
    document = schemathesis.openapi.from_url(f"{URL}/openapi.json")
    num_failed = 0
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        for result in document.get_all_operations():
            operation = result.ok()
            name = f"{mode.value} {operation.method.upper()} {operation.path}"
            try:
                seen = ask_all(operation, mode)
            except (hypothesis.errors.Unsatisfiable, schemathesis.errors.SchemathesisError):
                continue  # nothing of it can be wrong: it takes no body and no query
            except Exception as error:
                report(name, "fail", f"{type(error).__name__}: {error}")
                num_failed += 1
            else:
                summary = ", ".join(f"{count} x {status}" for status, count in sorted(seen.items()))
                report(name, "pass", count=max(1, sum(seen.values())), about=f"answers: {summary}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
