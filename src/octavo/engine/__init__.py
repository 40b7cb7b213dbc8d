"""The engine: the step loop around the scheduler, its process, and the protocol of its clients."""
