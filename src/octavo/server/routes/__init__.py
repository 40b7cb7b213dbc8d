"""One module per group of endpoints; each adds its own routes to the app."""
