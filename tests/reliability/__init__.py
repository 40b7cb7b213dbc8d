"""The reliability scorecard: each of its rows is a test here or beside its code."""
