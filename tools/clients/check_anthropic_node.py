"""Anthropic's TypeScript package in Node: messages, streams, tool runners of two turns, structured output, errors."""

import sys
from pathlib import Path

from checking import run_node

CLIENT = "@anthropic-ai/sdk"
PACKAGES = []
NODE_PACKAGES = ["@anthropic-ai/sdk", "zod"]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]

if __name__ == "__main__":
    sys.exit(run_node(Path(__file__).with_name("anthropic_node.mjs")))
