"""The lines that docs/extending.md shows are a sampling parameter: all APIs, Python and the sampler have it."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SRC

CHECK = """
import asyncio

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.sampler import Sampler
from tests.server.fakes import Harness

ASK = {"model": "tiny", "max_tokens": 4}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
CALLS = {  # path -> body, the parameter's name in errors, and whether it is among the options
    "/v1/chat/completions": ({**ASK, **MESSAGES}, "odd_penalty", False),
    "/v1/completions": ({**ASK, "prompt": "hi"}, "odd_penalty", False),
    "/v1/responses": ({"model": "tiny", "input": "hi"}, "odd_penalty", False),
    "/v1/messages": ({**ASK, **MESSAGES}, "odd_penalty", False),
    "/api/chat": ({"model": "tiny", "stream": False, **MESSAGES}, "options.odd_penalty", True),
    "/api/generate": ({"model": "tiny", "stream": False, "prompt": "hi"}, "options.odd_penalty", True),
}


async def check_apis() -> None:
    harness = Harness()
    for path, (body, name, is_option) in CALLS.items():
        for value, status in ((2.5, 200), (101.0, 400), ("much", 400)):
            fields = {"odd_penalty": value}
            asked = {**body, **({"options": fields} if is_option else fields)}
            answer = await harness.request("POST", path, json=asked)
            assert answer.status_code == status, (path, value, answer.text)
            assert "x-octavo-ignored" not in answer.headers, path
            if status == 400:
                assert name in answer.text, (path, answer.text)
            else:
                assert harness.engine.requests[-1].params.odd_penalty == value, path
        await harness.request("POST", path, json=body)
        assert harness.engine.requests[-1].params.odd_penalty == 0, path
    document = (await harness.get("/openapi.json")).json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["odd_penalty"]["description"] == "how much less likely odd token ids are"


def check_python() -> None:
    assert SamplingParams().odd_penalty == 0
    with pytest.raises(InvalidRequestError, match="odd_penalty is -1; give a number from 0"):
        SamplingParams(odd_penalty=-1)


def check_sampler() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, odd_penalty=5.0)]
    sampler = Sampler(2, torch.zeros((2, 9), dtype=torch.int32), 50)
    for slot, one in enumerate(params):
        sampler.put(slot, one, SequenceIds(np.zeros(5, dtype=np.int64)))
    logits = torch.zeros(2, 50)
    logits[:, 7], logits[:, 8] = 2.0, 1.0
    assert sampler.sample(logits, SamplingRows(np.arange(2), np.full(2, 5))).ids_R.tolist() == [7, 8]


asyncio.run(check_apis())
check_python()
check_sampler()
"""


def shown_lines() -> tuple[str, str, str]:
    """The field, the processor and the row that docs/extending.md shows."""
    section = (ROOT / "docs/extending.md").read_text().partition("## A sampling parameter\n")[2].partition("\n## ")[0]
    declared, processor, row = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return declared, processor, row


def add(path: Path, before: str, lines: str) -> None:
    """Put lines before a text that occurs once."""
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has {before!r} {text.count(before)} times"
    path.unlink()  # a link to the source
    path.write_text(text.replace(before, lines + before))


@pytest.mark.timeout(120)
def test_P01_a_new_sampling_parameter_reaches_every_api_and_the_sampler(tmp_path: Path) -> None:
    package = tmp_path / "octavo"
    shutil.copytree(SRC / "octavo", package, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    declared, processor, row = shown_lines()
    add(package / "core/request.py", "    dry_multiplier: Annotated", textwrap.indent(declared, "    "))
    add(package / "sampling/processors.py", "    Penalties, DryPenalty,", "    OddPenalty,\n")
    add(package / "sampling/processors.py", "# In the order in which they edit a row.", processor + "\n\n")
    add(package / "server/api/sampling.py", '    SamplingField("dry_multiplier"', f"    {row.strip()},\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ran = subprocess.run(
        [sys.executable, "-c", CHECK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
