from tests.executors.conformance import dense, tiny_folder

__all__ = ["dense", "tiny_folder"]
