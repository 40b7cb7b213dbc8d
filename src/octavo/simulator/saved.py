"""Saves a simulation's figures and curves as JSON, and reads the files of several runs back for a comparison.

Owns: the file's form. Does not: compute figures (summary) or lay out (report).
Figures have one line each, for people and tools; the curves of a case are in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.simulator.outcomes import ReplicaTotals
from octavo.simulator.report import Case, Objective

VERSION = 1


def as_json(facts: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """Return the text of a file with `facts`, and each case's curves."""
    figures = json.dumps(facts, indent=1).removesuffix("\n}")
    curves = ",\n  ".join(
        json.dumps({name: value for name, value in asdict(case).items() if name != "facts"}) for case in cases
    )
    return f'{figures},\n "version": {VERSION},\n "cases": [\n  {curves}\n ]\n}}'


def read_cases(paths: Sequence[str]) -> tuple[list[Case], dict[str, list[str]]]:
    """Return the cases of files in order, and for each setting a text for each case. Raises ConfigError.

    A case is named after its file, and after its policy too where a file has several.
    """
    cases: list[Case] = []
    settings: list[dict[str, str]] = []
    for path in paths:
        found, common = _load(path)
        for case in found:
            settings.append({**common, "policy": case.label})
            case.label = Path(path).stem + (f" {case.label}" if len(found) > 1 else "")
        cases += found
    labels = [case.label for case in cases]
    for case in cases:
        if labels.count(case.label) > 1:
            raise ConfigError(f"--compare has two runs with the name {case.label!r}; give the files other names")
    names = dict.fromkeys(name for one in settings for name in one)
    return cases, {name: [one.get(name, "-") for one in settings] for name in names}


def _load(path: str) -> tuple[list[Case], dict[str, str]]:
    """Return a file's cases and settings."""
    try:
        saved: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--compare {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--compare {path} is no JSON ({error}); give a file of simulate --json FILE") from None
    try:
        if saved["version"] == VERSION:
            return [_case_of(fields, saved["runs"]) for fields in saved["cases"]], dict(saved["settings"])
    except (KeyError, TypeError, ValueError):
        pass  # another program's file, or one that was edited
    raise ConfigError(f"--compare {path} has no runs of this version; make it anew with octavo simulate --json {path}")


def _case_of(fields: dict[str, Any], runs: dict[str, Any]) -> Case:
    replicas = [ReplicaTotals(**totals) for totals in fields["replicas"]]
    objectives = [Objective(*one) for one in fields["objectives"]]
    return Case(**{**fields, "facts": runs[fields["label"]], "replicas": replicas, "objectives": objectives})
