"""The words of workloads: taken apart whole, and every mistake named with its value and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.observe.recording import RecordingError
from octavo.simulator.workloads import KINDS, Shaping, open_workload
from octavo.simulator.workloads.spec import Spec, read_number
from octavo.simulator.workloads.synthetic import read_distribution

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
VALUES = st.one_of(
    st.integers(0, 10**6).map(str),
    st.floats(0, 1e6, allow_nan=False).map(str),
    st.tuples(NAMES, st.lists(st.integers(0, 99), max_size=3)).map(
        lambda one: f"{one[0]}({','.join(map(str, one[1]))})"
    ),
)


@given(NAMES, st.dictionaries(NAMES, VALUES, max_size=5))
def test_what_was_put_together_is_taken_apart(kind: str, options: dict[str, str]) -> None:
    text = kind + ":" + ",".join(f"{name}={value}" for name, value in options.items())
    spec = Spec(text)
    assert (spec.kind, spec.path, spec.options) == (kind, "", options)


@given(st.text(max_size=60))
def test_any_words_give_a_workload_or_a_typed_error(text: str) -> None:
    try:
        assert len(list(open_workload(text, Shaping(limit=3)))) <= 3
    except (ConfigError, RecordingError) as error:  # "/" is a folder without a recording
        assert str(error)


@given(
    st.sampled_from([name for name, kind in KINDS.items() if not kind.is_file]),
    st.text("=,():.0123456789ratemk", max_size=30),
)
def test_any_options_of_a_kind_give_a_workload_or_a_typed_error(kind: str, rest: str) -> None:
    try:
        arrivals = list(open_workload(f"{kind}:{rest}", Shaping(limit=3)))
    except ConfigError as error:
        assert str(error)
    else:
        assert all(one.prompt_tokens >= 1 and one.output_tokens >= 1 and one.time >= 0 for one in arrivals)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "unknown kind 'nothing'; give one of agentic"),
        ("possion:rate=1", "unknown kind 'possion'; did you mean 'poisson'?"),
        ("poisson:", "needs rate=NUMBER, as in poisson:rate=1"),
        ("poisson:rate=fast", "rate is 'fast'; give a number above 0"),
        ("poisson:rate=0", "rate is '0'; give a number above 0"),
        ("poisson:rate=nan", "rate is 'nan'; give a number above 0"),
        ("poisson:rate=2,rate=3", "gives rate twice; give it once"),
        ("poisson:rate=2,promt=5", "unknown key 'promt'; did you mean 'prompt'?"),
        ("poisson:rate=2,colour=red", "unknown key 'colour'; poisson takes "),
        ("poisson:rate=2,prompt=lognormal(5", "leaves a bracket open"),
        ("poisson:rate=2,prompt=5)", "closes a bracket that is not open"),
        ("poisson:rate=2,prompt=lognormal(5)", "write lognormal(median,sigma) with numbers"),
        ("poisson:rate=2,prompt=lognormal(5,-1)", "write lognormal(median,sigma) with numbers"),
        ("poisson:rate=2,prompt=uniform(9,3)", "give the smaller bound first"),
        ("poisson:rate=2,prompt=logarithmic(3)", "unknown distribution 'logarithmic'; give one of fixed, uniform"),
        ("poisson:rate=2,prompt=0", "prompt is '0'; give at least 1 token"),
        ("poisson:rate=2,output=uniform(0,0.4)", "output is 'uniform(0,0.4)'; give at least 1 token"),
        ("poisson:rate=2,prompt=quantiles(0:1)", "has 1 quantiles; give at least two"),
        ("poisson:rate=2,prompt=quantiles(0:9,50:3)", "'50:3' does not rise; give the quantiles in order"),
        ("poisson:rate=2,prompt=quantiles(0:1,101:3)", "'101:3' is no quantile"),
        ("poisson:rate=2,lengths=martian", "lengths is 'martian'; give azure_conv, azure_code, or a trace"),
        ("poisson:rate=2,lengths=azure_conv,prompt=3", "gives lengths twice"),
        ("poisson:rate=2,requests=0", "requests is '0'; give a whole number of at least 1"),
        ("poisson:rate=2,requests=1.5", "requests is '1.5'; give a whole number of at least 1"),
        ("poisson:2", "'2' is no option; write name=value"),
        ("poisson:rate=2,3", "'3' is no option; write name=value"),
        ("onoff:rate=2,on=0", "on is '0'; give a number above 0"),
        ("wave:rate=2,swing=2", "swing is 2; give 0 to 1"),
        ("all_at_once:duration=3", "never ends; give requests=N"),
        ("closed:duration=3", "give requests=N"),
        ("azure:", "names no file; write azure:PATH"),
        ("azure:/no/such.csv", "there is no /no/such.csv"),
    ],
)
def test_mistakes_are_named_with_a_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(open_workload(text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate_scale", 0), ("start", -1), ("end", 0), ("limit", 0), ("max_len", 1), ("too_long", "cut")],
)
def test_a_shaping_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value!r}; give"):
        Shaping(**{field: value})


def test_numbers_are_written_as_settings_are() -> None:
    assert [read_number(text) for text in ("4K", "2k", "1M", "1e3", "-", "nan", "1_000", "")] == [
        4096, 2000, 1048576, 1000, None, None, None, None,
    ]  # fmt: skip


def test_there_is_no_workload_without_words() -> None:
    with pytest.raises(ConfigError, match="give one, such as poisson:rate=2"):
        open_workload([])


def test_a_bare_number_is_a_length() -> None:
    import random

    assert read_distribution("4K", "prompt")(random.Random(0)) == 4096
