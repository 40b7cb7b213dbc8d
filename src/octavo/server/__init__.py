"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over Sessions. Needs no torch."""
