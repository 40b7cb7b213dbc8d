"""Other engines beside this one: an adapter a peer, and the scripts that run inside the peers' environments."""
