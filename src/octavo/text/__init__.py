"""Text to token ids and back: tokenizers, incremental detokenizing, stop strings, chat templates. No torch."""
