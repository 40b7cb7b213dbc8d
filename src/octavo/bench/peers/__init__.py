"""Other engines beside this one: an adapter for each peer, and the scripts that run inside the peers' environments."""
