"""Which name a misspelled word means; no name at all where none is near."""

import pytest

from octavo.config import SETTINGS
from octavo.config.spelling import did_you_mean, near_names, unknown

FLAGS = [flag for setting in SETTINGS for flag in setting.flags]


@pytest.mark.parametrize(
    "word, names, near",
    [
        ("smolm2", ["smollm2", "smollm2:135m"], ["smollm2"]),
        ("smollm", ["smollm2"], ["smollm2"]),
        ("srve", ["serve", "stop"], ["serve"]),
        ("possion", ["poisson", "gamma"], ["poisson"]),
        ("--max-num-seq", FLAGS, ["--max-num-seqs"]),
        ("--max_num_seqs", FLAGS, ["--max-num-seqs"]),
        ("--num-max-seqs", FLAGS, ["--max-num-seqs"]),
        ("--Threads", FLAGS, ["--threads"]),
        ("--max-model-length", FLAGS, ["--max-model-len"]),
        ("--enable-prefix", FLAGS, ["--enable-prefix-caching"]),
    ],
)
def test_a_typing_error_is_understood(word, names, near) -> None:
    assert near_names(word, names) == near


@pytest.mark.parametrize(
    "word",
    ["--base-url", "--url", "--gpu-layers", "--hf-overrides", "--trust-remote-code", "--max", "--x", "-z", "--enable"],
)
def test_no_name_is_guessed_where_none_is_near(word) -> None:
    assert near_names(word, FLAGS) == []


def test_the_message_has_the_near_name_else_the_remedy_else_the_names() -> None:
    assert unknown("model", "smolm2", ["smollm2"]) == "unknown model 'smolm2'; did you mean 'smollm2'?"
    assert unknown("flag", "--beam", FLAGS, "see octavo --help") == "unknown flag '--beam'; see octavo --help"
    assert unknown("shell", "tcsh", ["bash", "fish"]) == "unknown shell 'tcsh'; give one of bash, fish"
    assert unknown("flag", "--beam", FLAGS) == "unknown flag '--beam'"
    assert did_you_mean("ab", ["ac", "ad"]) == ""
