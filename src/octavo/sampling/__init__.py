"""From logits to token ids: draws, logits processing, selection, log-probabilities."""
