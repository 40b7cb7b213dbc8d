"""Row 27: nothing in the source loads code from data, or listens everywhere.

The gate itself, and the tests that it catches what it is for, are tests/test_architecture.py's.
"""

from tests.reliability.scorecard import Score
from tests.source_tree import modules
from tests.test_architecture import BANNED_KEYWORDS, BANNED_MODULES, BANNED_NAMES, construct_faults


def test_row_27_nothing_loads_code_from_data_or_listens_everywhere(score: Score) -> None:
    assert {"pickle", "marshal", "shelve"} <= BANNED_MODULES and {"shell", "trust_remote_code"} <= BANNED_KEYWORDS
    assert {"eval", "exec", "torch.load", "yaml.load"} <= BANNED_NAMES
    read = modules("src") + modules("tools")
    assert len(read) > 200
    faults = [fault for module in read for fault in construct_faults(module)]
    print(*faults, sep="\n")
    score.count(f"such constructs in {len(read)} files", len(faults))
