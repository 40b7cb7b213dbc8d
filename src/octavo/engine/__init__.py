"""Runs the loop around the scheduler, keeps the ledger, and turns requests into streams."""
