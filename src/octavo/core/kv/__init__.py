"""The paged KV cache, as numbers: blocks, keys, tables. No tensors."""
