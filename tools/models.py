"""Write the tables of docs/models.md: model types, GGUF types.

Owns: the tables' form. The rows are those of tests/models/zoo.py, with what tests/models/test_zoo.py measured
(tests/data/model_types.json), and the code's own tables.
Does not: measure. `OCTAVO_WRITE_TABLES=1 python -m pytest -n 0 tests/models/test_zoo*.py` does.
Usage: python -m tools.models [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES
from tests.models.zoo import ROWS, ModelType
from tests.models.zoo_transformers import TRANSFORMERS, UNTESTED
from tools.sections import read_section, write_section

from octavo.nn.gguf_blocks import GGUF_TYPES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "data" / "model_types.json"
_COLUMNS = (
    "models",
    "`model_type`",
    "windows",
    "experts",
    "GGUF",
    "int8, int4",
    "ranks",
    "logits within",
    "bits in a batch",
)
# The names under which people know models of a type.
KNOWN_AS = {
    "llama": "Llama 2 and 3, SmolLM2, TinyLlama",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma 3, text",
    "apertus": "Apertus",
    "arcee": "Arcee AFM",
    "afmoe": "Trinity",
    "bitnet": "BitNet b1.58",
    "cohere": "Command R, Aya",
    "cohere2": "Command R7B, Command A",
    "cwm": "Code World Model",
    "dbrx": "DBRX",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3, R1",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5, experts",
    "exaone4": "EXAONE 4",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, its text",
    "gemma3n_text": "Gemma 3n, text",
    "gemma4_text": "Gemma 4, text",
    "glm": "GLM-4-9B, GLM-Edge",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gpt_neox": "Pythia, GPT-NeoX",
    "gpt_oss": "GPT-OSS",
    "granite": "Granite 3",
    "granitemoe": "Granite 3, experts",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan, dense",
    "hunyuan_v1_moe": "Hunyuan, experts",
    "internlm3": "InternLM 3",
    "llama4_text": "Llama 4, text",
    "longcat_flash": "LongCat-Flash",
    "minicpm3": "MiniCPM 3",
    "minimax_m2": "MiniMax M2",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron-4, Minitron",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "phi": "Phi-1, Phi-1.5, Phi-2",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3_moe": "Qwen3-30B-A3B",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "solar_open": "Solar Open",
    "stablelm": "StableLM 2",
    "starcoder2": "StarCoder2",
    "vaultgemma": "VaultGemma",
}


def sections() -> dict[str, str]:
    """Return the text of each generated section."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    made = {"gguf types": _gguf_types(), "refused types": _refused_types(results)}
    for name, rows in (("native types", ROWS), ("transformers types", TRANSFORMERS)):
        count = len({row.model_type for row in rows})
        cells = [_model_type(row, results.get(row.name, {})) for row in sorted(rows, key=lambda row: row.name)]
        made[name] = f"{count} model types:\n\n{_table(_COLUMNS, cells)}"
    return made


def _model_type(row: ModelType, found: Mapping[str, Any]) -> list[str]:
    """Return one row's cells: its facts, then what was measured (nothing, if the row is new)."""
    bits = max(found["bits"].values()) if "bits" in found else None
    return [
        KNOWN_AS.get(row.model_type, "") if not row.label else row.label,
        f"`{row.model_type}`",
        "yes" if row.windows else "",
        "yes" if row.experts else "",
        found.get("gguf", ""),
        "yes" if {"int8", "int4"} <= found.keys() else "",
        "yes" if found.get("ranks") == "yes" else "",
        f"{found['difference']:.0e}" if "difference" in found else "",
        "" if bits is None else "equal" if bits == 0.0 else f"within {bits:.0e}",
    ]


def _refused_types(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each reason, with its model types."""
    by_reason: dict[str, list[str]] = {}
    for name, found in sorted(results.items()):
        if "refused" in found:
            reason = re.sub(r"^\w+ does not attend", "its layers do not attend", found["refused"])
            reason = re.sub(r"^.+ keep a state", "its layers keep a state", reason)
            by_reason.setdefault(reason, []).append(f"`{name}`")
    by_reason["not tested: most of them are models of images or audio too"] = [f"`{name}`" for name in UNTESTED]
    rows = [[reason, ", ".join(names)] for reason, names in sorted(by_reason.items())]
    return _table(("why", "`model_type`"), rows)


def _gguf_types() -> str:
    rows = []
    for kind, entry in sorted(GGUF_TYPES.items(), key=lambda item: item[0].name):
        values, size = GGML_QUANT_SIZES[kind]
        if entry.codes is not None:
            kept = f"{entry.codes.kind.name.lower()}, groups of {entry.codes.group}: the file's codes"
        else:
            kept = "floats" if entry.nearest is None else f"{entry.nearest.name.lower()}, the nearest codes"
        rows.append([f"`{kind.name}`", f"{8 * size / values:.4g}", kept])
    return _table(("type", "bits a weight in the file", "kept as"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: list[str]) -> int:
    """Write the sections; with --check only compare, and return 1 if one is out of date."""
    made = sections()
    if arguments == ["--check"]:
        old = [name for name, text in made.items() if read_section(PAGE, name) != text]
        print(f"docs/models.md is out of date: {', '.join(old)}" if old else "docs/models.md is current")
        return int(bool(old))
    for name, text in made.items():
        write_section(PAGE, name, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
