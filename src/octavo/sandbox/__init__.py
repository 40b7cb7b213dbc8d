"""Run work on clients' inputs that may take too much time or memory in processes that can be killed. No torch."""
