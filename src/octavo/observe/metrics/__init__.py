"""Counters and histograms of the front end, and their Prometheus text."""
