"""Row 17: values that would cost memory by their size are refused by name, at no cost; at the bound they are served."""

from pathlib import Path
from typing import Any

import pytest

from tests.reliability.load import ask
from tests.reliability.scorecard import IS_WHOLE, Score
from tests.reliability.timed_api import serving

HUGE, FAR = 10**6, 10**18
MANY = 10**6 if IS_WHOLE else 10**5  # a list of a million costs a second to read
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
VOCAB = 258
# Fields of a text completion, and the one that the refusal names.
TEXT: list[tuple[dict[str, Any], str]] = [
    *(({"n": value}, "n") for value in (17, HUGE, FAR, -1, 0)),
    *(({"best_of": value}, "best_of") for value in (17, HUGE, FAR)),
    ({"n": 16, "best_of": HUGE}, "best_of"),
    ({"n": HUGE, "use_beam_search": True}, "n"),
    ({"best_of": HUGE, "use_beam_search": True}, "best_of"),
    *(({"logprobs": value}, "logprobs") for value in (21, HUGE, FAR, -1)),
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 2**40, FAR)),
    *(({"min_tokens": value}, "min_tokens") for value in (-1, FAR)),
    *(({"top_k": value}, "top_k") for value in (FAR, -2)),
    *(({"logit_bias": {key: 1.0}}, "logit_bias") for key in (str(VOCAB), str(HUGE), "9999999999")),
    *(({"logit_bias": {"5": value}}, "logit_bias") for value in (100.5, -101, 1e300)),
    ({"logit_bias": {str(i): 1.0 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {str(i): 1.0 for i in range(50_000)}}, "logit_bias"),
    ({"logit_bias": {"-1": 1.0}}, "logit_bias.-1"),
    ({"logit_bias": {"1" * 5000: 1.0}}, "logit_bias." + "1" * 5000),
    ({"stop": ["x"] * MANY}, "stop"),
    ({"stop": ["x" * HUGE]}, "stop[0]"),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids"),
    ({"allowed_token_ids": [FAR]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * MANY}, "allowed_token_ids"),
    ({"bad_words": ["x"] * MANY}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"dry_sequence_breakers": ["x"] * 65, "dry_multiplier": 1.0}, "dry_sequence_breakers"),
    ({"dry_range": FAR, "dry_multiplier": 1.0}, "dry_range"),
    *(({name: 1e308}, name) for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty")),
    *(({name: 1e308}, name) for name in ("frequency_penalty", "repetition_penalty", "dry_base", "timeout")),
    ({"seed": FAR * FAR}, "seed"),
    ({"priority": FAR}, "priority"),
    ({"cache_salt": "x" * HUGE}, "cache_salt"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"prompt": [[5]] * MANY}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": [5] * MANY}, "prompt"),
    ({"prompt": "x" * HUGE}, "prompt"),
]
TALK: list[tuple[dict[str, Any], str]] = [
    ({"messages": MESSAGES * 2049}, "messages"),
    ({"messages": MESSAGES * (MANY // 10)}, "messages"),
    ({"logprobs": True, "top_logprobs": HUGE}, "top_logprobs"),
    ({"max_completion_tokens": FAR}, "max_completion_tokens"),
    ({"n": HUGE}, "n"),
]
AT_THE_BOUND: list[dict[str, Any]] = [
    {"n": 16},
    {"best_of": 16, "n": 1},
    {"logprobs": 20},
    {"logit_bias": {str(i % VOCAB): 100.0 for i in range(VOCAB)}},
    {"stop": ["x" * 256] * 16},
    {"stop_token_ids": [5] * 1024},
    {"allowed_token_ids": [5] * 65_536},
    {"bad_words": ["x" * 256] * 128},
    {"cache_salt": "x" * 256},
    {"prompt": ["x"] * 256},
]


def memory_bytes(pid: int, name: str) -> int:
    """VmRSS now, VmHWM at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
async def test_row_17_huge_values_are_400_and_cost_nothing(score: Score) -> None:
    with serving(model="0", max_sequences=16) as (process, port):
        for fields in AT_THE_BOUND * 2:  # what an honest client may make it allocate comes first
            outcome = await ask(port, {"prompt": "hi", "max_tokens": 2, **fields})
            assert outcome.status == 200, (str(fields)[:80], outcome.body[:200])
        before = memory_bytes(process.pid, "VmRSS")
        wrong, asked = [], 0
        for _ in range(score.dose(1, 5)):
            for path, cases in ((None, TEXT), (CHAT, TALK)):
                for fields, param in cases:
                    asked += 1
                    if path is None:
                        outcome = await ask(port, {"prompt": "hi", **fields})
                    else:
                        outcome = await ask(port, {"messages": MESSAGES, **fields}, path)
                    is_named = f'"param":"{param}'.encode() in outcome.body
                    is_named |= b"body_too_complex" in outcome.body  # a million of anything is not looked into
                    if outcome.status != 400 or not is_named:
                        wrong.append((str(fields)[:60], param, outcome.status, outcome.body[:160]))
        grown = memory_bytes(process.pid, "VmHWM") - before
        alive = process.poll() is None
    score.tell("requests", asked)
    assert not wrong, wrong
    score.share("refused with 400 and the field's name", asked - len(wrong), asked)
    score.count("servers that died", 0 if alive else 1)
    score.count("MB of memory at most", round(grown / 1e6), most=32)
