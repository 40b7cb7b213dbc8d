"""HTTP: connections, keys, limits, and the middleware and endpoints of the application."""
