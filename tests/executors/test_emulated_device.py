"""The torch executor on an emulated accelerator: conformance, and what the host waits for."""

from __future__ import annotations

from pathlib import Path

from octavo.executors.protocol import Executor
from tests.executors.conformance import Conformance
from tests.executors.emulated_device import OnEmulated
from tests.executors.test_torch_executor import make


class TestEmulated(Conformance):
    def make_executor(self, folder: Path) -> Executor:
        return OnEmulated(lambda: make(folder, "batched", "cpu"))
