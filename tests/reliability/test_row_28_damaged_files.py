"""Row 28: damaged model files are refused with a typed error, whatever is wrong; nothing crashes, no code is run."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.reliability.scorecard import Score

CHILD = Path(__file__).with_name("loading_child.py")


def run(folder: Path, first: int, end: int, corpus: str) -> tuple[list[dict[str, object]], str]:
    """Outcomes of these seeds, up to a crash, and how the child ended: "" when well."""
    words = [sys.executable, "-X", "faulthandler", str(CHILD), str(folder), str(first), str(end), corpus]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "stderr", "w+") as errors:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, timeout=1700)
        errors.seek(0)
        told = errors.read()[-1500:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == 0:
        return lines, ""
    name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
    return lines, f"{name}: {told}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("corpus", "num_quick"), [("plain", 80), ("formats", 150)])
def test_row_28_damaged_files_are_refused_and_nothing_crashes(
    score: Score, tmp_path: Path, corpus: str, num_quick: int
) -> None:
    """Safetensors, indexes, configurations, tokenizers, templates and GGUF files, each with a few faults.

    "formats": quantised checkpoints, mixtures, models of transformers, encoders, split files, importance matrices.
    """
    score.of(corpus)
    count = score.dose(num_quick, 5000)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    crashes: list[str] = []
    did: list[str] = []
    first = 0
    while first < count and len(crashes) < 20:
        lines, end = run(tmp_path, first, count, corpus)
        for line in lines:
            if "outcome" in line:
                outcome = str(line["outcome"])
                outcomes[outcome if outcome in ("loaded", "refused") else "wrong"] += 1
                wrong += [f"{line['number']}: {outcome}"] if outcome not in ("loaded", "refused") else []
                did += [f"{line['number']}: {each}" for each in line["did"]]  # type: ignore[attr-defined]
        last = int(str(lines[-1]["number"])) if lines else count
        crashes += [f"{last}: {end}"] if end else []
        first = last + 1
    print("\n".join([*crashes, *wrong[:30], *did[:10]]))
    score.tell("damaged files", sum(outcomes.values()))
    score.tell("refused; loaded because the fault changed nothing that matters",
               f"{outcomes['refused']}, {outcomes['loaded']}")  # fmt: skip
    score.count("crashes", len(crashes))
    score.count("errors of unexpected types", len(wrong))
    score.count("processes started, connections, files written elsewhere, objects unpickled", len(did))
    assert outcomes["refused"] > count // 3
