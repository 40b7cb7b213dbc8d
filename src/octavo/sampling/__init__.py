"""Sampling of token ids from logits: draws, logits processing, selection, log-probabilities."""
