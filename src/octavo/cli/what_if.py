"""`octavo replay --what-if`: the recorded requests under other settings, beside the recorded run.

Owns: reading the settings, the simulations, the table. Does not: replay (replay), simulate or fit (simulator).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from octavo.config import SETTINGS, Setting
from octavo.config.spelling import unknown
from octavo.core.limits import Limits
from octavo.core.policy import find_policy
from octavo.errors import ConfigError
from octavo.observe.recording import Recording
from octavo.simulator.costs import cost_model
from octavo.simulator.recorded import recorded_run
from octavo.simulator.report import Case, figures
from octavo.simulator.routers import ROUTERS
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise
from octavo.simulator.workloads import Shaping, open_workload

MAX_COLUMNS = 8
_SECTIONS = ("cache", "scheduling")
_ALIASES = {"max_num_seqs": "max_sequences", "max_num_batched_tokens": "max_batch_tokens"}
_OF_SETUP = {"depth": int, "pipeline_depth": int, "replicas": int, "router": str, "max_waiting": int}
# Limits that a simulation cannot change, and why.
_REFUSED = {
    "vocab_size": "it changes no decision",
    "groups": "they are the model's",
    "max_draft_tokens": "a recording does not tell which guesses would have been right",
    "max_draft_rows": "a recording does not tell which guesses would have been right",
    "encoder_budget": "simulated requests have no media",
    "encoder_cache": "simulated requests have no media",
    "separate_modalities": "simulated requests have no media",
    "adapter_slots": "simulated requests have no adapters",
    "tenant_weights": "give octavo simulate --workload DIR --tenant-weight instead",
}


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to try, as they were written: new limits, fields of the setup, and the factor on the arrival rate."""

    label: str
    limits: Limits
    setup: dict[str, Any] = field(default_factory=dict)
    rate_scale: float = 1.0


def read_change(text: str, recorded: Limits) -> Change:
    """Parse `policy=fair,max_sequences=64`. Raises ConfigError naming the word and what to give."""
    values: dict[str, Any] = {}
    setup: dict[str, Any] = {}
    rate_scale = 1.0
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = word.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not value.strip():
            raise ConfigError(f"--what-if has {word!r}; give NAME=VALUE, as in policy=fair,max_sequences=64")
        if name == "rate_scale":
            rate_scale = _number(word, value)
        elif name in _OF_SETUP:
            setup[name.removeprefix("pipeline_")] = _setup_value(name, word, value.strip())
        else:
            values.update(_limit(name, word, value.strip(), recorded))
    if not (values or setup or rate_scale != 1.0):
        raise ConfigError(f"--what-if is {text!r}; give at least one NAME=VALUE, as in policy=fair")
    return Change(text, _changed(recorded, values), setup, rate_scale)


def _setup_value(name: str, word: str, value: str) -> Any:
    if name == "router":
        if value not in ROUTERS:
            raise ConfigError(f"--what-if has {word!r}: {unknown('router', value, ROUTERS)}")
        return value
    return int(_number(word, value))


def _number(word: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"--what-if has {word!r}; give a number above 0")
    return number


def _settings() -> dict[str, Setting]:
    """Return the settings that are limits, by every spelling."""
    names = {one.name for one in fields(Limits)}
    found = {}
    for setting in SETTINGS:
        name = "prefix_caching" if setting.name == "enable_prefix_caching" else setting.name
        if setting.section in _SECTIONS and name in names and not setting.is_hidden:
            found.update({key.replace("-", "_"): setting for key in (*setting.keys, name)})
    return found


def _limit(name: str, word: str, value: str, recorded: Limits) -> dict[str, Any]:
    name = _ALIASES.get(name, name)
    if name in _REFUSED:
        raise ConfigError(f"--what-if has {word!r}, which a replay cannot try: {_REFUSED[name]}")
    if name in ("num_blocks", "host_blocks", "max_model_len"):
        count = int(_number(word, value))
        return {name: count if name == "max_model_len" else (count,) * len(recorded.groups)}
    if name == "kv_cache_tokens":
        return {"num_blocks": (max(1, int(_number(word, value)) // recorded.block_size),) * len(recorded.groups)}
    known = _settings()
    if name not in known:
        every = (*known, *_OF_SETUP, "rate_scale", "num_blocks", "host_blocks", "kv_cache_tokens", "max_model_len")
        remedy = f"give one of {', '.join(sorted(every))}"
        raise ConfigError(f"--what-if: {unknown('setting', name, every, remedy)}")
    setting = known[name]
    read = setting.read(value, f"{setting.key} of --what-if")
    if setting.name == "policy":
        find_policy(read)
    return {"prefix_caching" if setting.name == "enable_prefix_caching" else setting.name: read}


def _changed(recorded: Limits, values: dict[str, Any]) -> Limits:
    """Return the limits with these values, without drafts; a pool keeps its tokens if only the block size changes."""
    size = values.get("block_size", recorded.block_size)
    if size != recorded.block_size:
        for name in ("num_blocks", "host_blocks"):
            values.setdefault(name, tuple(count * recorded.block_size // size for count in getattr(recorded, name)))
    return replace(recorded, **{"max_draft_tokens": 0, **values})


def compare(recording: Recording, texts: Sequence[str], cost: str) -> tuple[list[Case], list[str]]:
    """Return the recorded run, the same simulated, and each change simulated; with remarks on what is not simulated.

    `cost` names a cost model, or is "fitted": fitted to this recording. Raises ConfigError, RecordingError.
    """
    if len(texts) > MAX_COLUMNS:
        raise ConfigError(f"--what-if is given {len(texts)} times; give at most {MAX_COLUMNS}")
    header = recording.header
    recorded = header.limits
    as_was = Change("simulated", replace(recorded, max_draft_tokens=0))
    changes = [as_was, *(read_change(text, recorded) for text in texts)]
    costs = cost_model(f"fitted:{recording.path}" if cost == "fitted" else cost)
    was = recorded_run(recording)
    cases = [Case.of("recorded", was, summarise(was))]
    workload = open_workload([f"recording:{recording.path}"], Shaping())
    came = list(workload)
    for change in changes:
        scaled = came if change.rate_scale == 1 else [replace(one, time=one.time / change.rate_scale) for one in came]
        setup = Setup(change.limits, costs, depth=min(header.depth, 2), sample_s=1.0)
        done = simulate(scaled, replace(setup, **change.setup))
        cases.append(Case.of(change.label, done, summarise(done)))
    counts = workload.notes.counts
    return cases, [*_remarks(recording, changes), *(f"{count:,} requests {words}" for words, count in counts.items())]


def _remarks(recording: Recording, changes: Sequence[Change]) -> Iterator[str]:
    recorded = recording.header.limits
    if recorded.max_draft_tokens:
        yield "the engine speculated; simulations do not, so they take more steps"
    if not recorded.prefix_caching and any(change.limits.prefix_caching for change in changes):
        yield "recorded without prefix caching, so there are no block keys: simulations find nothing cached"
    if len(recording.segments) > 1:
        yield f"the engine died {len(recording.segments) - 1} times; simulations go on without"


def table(cases: Sequence[Case]) -> Iterator[str]:
    """Yield a table of the cases, one figure a line; the changes are numbered, with a legend above."""
    heads = ["recorded", "simulated", *(f"what-if {number}" for number in range(1, len(cases) - 1))]
    for head, case in zip(heads[2:], cases[2:], strict=True):
        yield f"{head}: {case.label}"
    yield f"{'':28}" + "".join(f"{head:>14}" for head in heads)
    rows = list(dict.fromkeys(name for case in cases for name, *_ in figures(case.facts)))
    columns = [
        {name: write(value) for name, value, write, _ in figures(case.facts) if value is not None} for case in cases
    ]
    for name in rows:
        yield f"{name:28}" + "".join(f"{column.get(name, '-'):>14}" for column in columns)
