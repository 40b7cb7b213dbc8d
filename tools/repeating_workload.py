"""Write a workload of prompts whose answers repeat their text, for measuring speculation by prompt lookup.

Usage: python tools/repeating_workload.py OUT.json [--model smollm2] [--max-tokens 128]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.artifacts.resolve import resolve_model
from octavo.text.text_model import TextModel

CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""
TABLE = "\n".join(f'{{"city": "{city}", "country": "{country}", "kind": "capital"}}' for city, country in (
    ("Paris", "France"), ("Rome", "Italy"), ("Madrid", "Spain"), ("Lisbon", "Portugal"), ("Vienna", "Austria"),
))  # fmt: skip
LETTER = (
    "Dear Anna, the meeting on Tuesday was moved to Thursday at ten in the morning. Please bring the report on the "
    "new office, the list of rooms, and the names of those who will move first. Kind regards, Martin."
)
TASKS = (
    f"Write this code again, with the name deposit changed to add:\n{CODE}",
    f"Repeat these lines exactly, twice:\n{TABLE}",
    f"Copy this letter, word for word:\n{LETTER}",
)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()
    text = TextModel.load(resolve_model(arguments.model))
    requests = []
    for task in TASKS:
        ids = text.prompt_ids_from_messages([{"role": "user", "content": task}])
        requests.append({"prompt_token_ids": ids, "max_tokens": arguments.max_tokens})
    arguments.out.write_text(json.dumps(requests))


if __name__ == "__main__":
    main()
