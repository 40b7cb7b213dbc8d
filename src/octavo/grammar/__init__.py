"""Grammars: what an output may be, compiled, followed token by token, and turned into masks. No torch."""
