"""Observers of a scheduler: histories of requests, statistics, metrics, frames, recordings, traces, the log."""
