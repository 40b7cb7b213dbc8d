"""What places replicas on machines: start, address, stop. A provider neither watches replicas nor carries requests."""
