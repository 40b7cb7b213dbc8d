"""The front end, which outlives its engines: open requests, engine processes, sessions of text, the journal."""
