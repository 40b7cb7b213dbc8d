"""Process clients' inputs that may need too much time or memory in child processes that can be killed. No torch."""
