"""Find and read model files: folders, GGUF files, repositories. No torch, no model code."""
