"""The pages: dashboard, chat, login form; the files that a browser loads, and how they are combined."""
