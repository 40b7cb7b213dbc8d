"""The pages: dashboard, chat, login form; the files that a browser reads, and how they are put together."""
