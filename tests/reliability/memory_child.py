"""A process whose address space ends some bytes above what the opened engine takes: for row 19.

Attention is the reference's, which makes whole matrices of scores: the larger the step, the more memory it wants.
Usage: python memory_child.py MODEL BYTES (0 = no limit); writes one line of JSON.
"""

import json
import resource
import sys
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.config import ExecutionConfig, ModelConfig  # noqa: E402
from octavo.core.request import Request, SamplingParams  # noqa: E402
from tests.executors.conformance import open_files  # noqa: E402  the path comes first
from tests.reliability.real_engine import RealHarness, SpoiltExecutor, head  # noqa: E402


def main(folder: str, slack: int) -> None:
    files, spec = open_files(Path(folder))
    execution = ExecutionConfig(threads=1, decoder="torch", attention="reference")
    executor = SpoiltExecutor(files, spec, execution, ModelConfig(dtype="float32"))
    limits = {"block_size": 16, "num_blocks": (700,), "max_model_len": 2048, "max_batch_tokens": 2048}
    with RealHarness(executor, **limits) as harness:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        harness.serve([Request("first", array("i", head(9, 40)), params)])
        if slack:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + slack,) * 2)
        requests = [Request(f"r{i}", array("i", head(i, 1200 + 150 * i)), params) for i in range(5)]
        said = harness.serve(requests)
        reasons = [reason.name for reason in harness.reasons(requests)]
        ids = [choices[0][0] for choices in said.values()]
        messages = [harness.end(request.request_id).message for request in requests]
        failed = harness.scheduler.statistics().num_failed_steps
    print(json.dumps({"ids": ids, "reasons": reasons, "failed_steps": failed, "messages": messages}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
