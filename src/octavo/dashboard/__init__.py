"""The web pages (dashboard, chat, login form): the files that a browser loads, and the code that combines them."""
