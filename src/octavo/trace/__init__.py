"""Traces of requests, and how lines of the log look."""
