"""Row 27: nothing in the source loads code from data, or listens everywhere.

The gate itself, and the tests that it catches what it is for, are tests/test_architecture.py's. It reads every Python
file of src, tools and tests, except those that are named here with the reason.
"""

from tests.reliability.scorecard import Score
from tests.source_tree import ROOT, modules
from tests.test_architecture import BANNED_KEYWORDS, BANNED_MODULES, BANNED_NAMES, construct_faults

# A file, or a folder with its "/" -> why it is not read.
EXEMPT = {
    "tools/clients/": "scripts that import other projects' clients, each in an environment of its own",
    "tests/test_architecture.py": "the lists of what is banned, and examples of it",
    "tests/core/test_gates.py": "runs the code of docs/policies.md as it is printed",
    "tests/server/test_fetch.py": "an address from which no image is fetched",
    "tests/server/test_responses_client.py": "runs the code of docs/apis.md as it is printed",
}


def test_row_27_nothing_loads_code_from_data_or_listens_everywhere(score: Score) -> None:
    assert {"pickle", "marshal", "shelve"} <= BANNED_MODULES and {"shell", "trust_remote_code"} <= BANNED_KEYWORDS
    assert {"eval", "exec", "torch.load", "yaml.load"} <= BANNED_NAMES
    found = modules("src") + modules("tools") + modules("tests")
    read = [module for module in found if not module.path.startswith(tuple(EXEMPT))]
    exempt = sorted({module.path for module in found} - {module.path for module in read})
    print(f"exempt, {len(exempt)} files:", *exempt, sep="\n")
    assert len(read) > 700 and {path.split("/")[0] for path in exempt} == {"tools", "tests"}
    faults = [fault for module in read for fault in construct_faults(module)]
    print(*faults, sep="\n")
    score.count(f"such constructs in {len(read)} of {len(found)} files", len(faults))


def test_row_27_exemptions_are_no_more_than_needed() -> None:
    assert all((ROOT / path).exists() for path in EXEMPT)
    for path in EXEMPT:
        read = [module for module in modules(path.split("/")[0]) if module.path.startswith(path)]
        assert any(construct_faults(module) for module in read), f"{path} needs no exemption"
