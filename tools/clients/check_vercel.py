"""Vercel's AI SDK with its OpenAI-compatible, OpenAI, Anthropic and Ollama providers: text, objects, tools, errors."""

import sys
from pathlib import Path

from checking import run_node

CLIENT = "Vercel AI SDK"
PACKAGES = []
NODE_PACKAGES = [
    "ai",
    "@ai-sdk/openai-compatible",
    "@ai-sdk/openai",
    "@ai-sdk/anthropic",
    "ollama-ai-provider-v2",
    "zod",
]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]

if __name__ == "__main__":
    sys.exit(run_node(Path(__file__).with_name("vercel.mjs")))
