"""Grammars: compile the constraints on an output, follow them token by token, and make token masks. No torch."""
