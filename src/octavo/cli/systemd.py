"""Tell systemd that the service is ready (Type=notify); do nothing if it does not ask. Source: sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def notify(state: str) -> None:
    """Send one state, such as READY=1."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)
