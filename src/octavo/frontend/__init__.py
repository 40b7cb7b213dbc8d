"""What outlives an engine: open requests, the processes of engines, sessions of text, the journal."""
