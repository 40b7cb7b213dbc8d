"""Formats of tool calls, a file for each family."""
