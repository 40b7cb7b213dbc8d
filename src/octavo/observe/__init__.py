"""Who watches a scheduler: histories of requests, statistics, metrics, frames, recordings, traces, log lines."""
