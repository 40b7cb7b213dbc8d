"""Batches: files of requests in OpenAI's format, run through the application itself."""
