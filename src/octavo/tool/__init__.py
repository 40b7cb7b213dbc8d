"""Work on what clients wrote that may take too long or too much: done in processes that can be killed. No torch."""
