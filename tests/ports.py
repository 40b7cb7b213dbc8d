"""A port for a server that a test starts later, or again."""

import random
import socket


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port below those that systems give to connections and to port 0, so that nothing takes it soon."""
    while True:
        port = random.randrange(20_100, 32_000)  # Ray's workers use lower ones
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
