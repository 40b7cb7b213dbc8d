"""The HTTP side: OpenAI's endpoints over Sessions. Needs no torch."""
