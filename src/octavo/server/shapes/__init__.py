"""How answers look on the wire, a file for each interface."""
