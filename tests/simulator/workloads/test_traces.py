"""Readers of traces: each public format in small, torn lines and bad numbers, and the golden values of real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.test_prefix_trace import NUM_BLOCKS, replay
from tests.public_data import public_file

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads import Shaping, open_workload

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00.0000000,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURST_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
118,ChatGPT,417,0,417,Conversation log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.5,d5983bf9,2,ChatGPT,36,29,65,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]}
"""
SERVING_SIM = '{"arrival_time_ns":46926808,"input_toks":35,"output_toks":531,"hash_ids16":[7,8]}\n'
AGENT = '{"requests": [{"t": 0, "in": 9, "out": 1, "hash_runs": [%s]}]}\n'
CLIENTS = "client,req_time,prompt_len,output_len,first_token_latency,request_latency\n1,0.65,256,250,0.9,12.5\n"


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    """A file of a trace."""
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(kind: str, path: Path, options: str = "") -> list[Arrival]:
    """All its arrivals."""
    return list(open_workload(f"{kind}:{path}{options}"))


def test_azure_of_both_years(tmp_path: Path) -> None:
    first, second, third = read("azure", write(tmp_path, AZURE_2023))
    assert (first.time, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.time == pytest.approx(4.314579, abs=1e-6)
    assert third.time == pytest.approx(5 * 3600 + 44 * 60 + 13.31941, abs=1e-5)
    assert third.output_tokens == 1
    assert read("azure", write(tmp_path, AZURE_2024))[1].time == pytest.approx(0.007405, abs=1e-6)


def test_an_answer_of_no_token_is_noted(tmp_path: Path) -> None:
    workload = open_workload(f"azure:{write(tmp_path, AZURE_2023)}")
    assert len(list(workload)) == 3
    assert workload.notes.counts == {"answers of no token, taken as one": 1}


def test_burstgpt_of_both_releases(tmp_path: Path) -> None:
    workload = open_workload(f"burstgpt:{write(tmp_path, BURST_1)}")
    assert [(one.time, one.prompt_tokens, one.output_tokens) for one in workload] == [(0, 472, 18), (40, 1087, 230)]
    assert workload.notes.counts == {"failed (no response), left out": 1}
    assert [one.time for one in read("burstgpt", write(tmp_path, BURST_1), ",model=GPT-4")] == [40]
    first, second = read("burstgpt", write(tmp_path, BURST_2))
    assert (first.session, second.time, second.output_tokens) == ("1722ac82", 51.5, 29)


def test_mooncake_keeps_ids_of_full_blocks(tmp_path: Path) -> None:
    first, second = read("mooncake", write(tmp_path, MOONCAKE))
    assert (tuple(first.keys), first.key_tokens, second.time, tuple(second.keys)) == ((0, 1), 512, 3.0, (0, 1))
    first, _ = read("mooncake", write(tmp_path, MOONCAKE), ",round=up")
    assert (first.prompt_tokens, tuple(first.keys)) == (1536, (0, 1, 2))


def test_serving_sim_and_clients(tmp_path: Path) -> None:
    [one] = read("serving_sim", write(tmp_path, SERVING_SIM))
    assert (one.time, one.prompt_tokens, tuple(one.keys), one.key_tokens) == (0.046926808, 35, (7, 8), 16)
    [one] = read("clients", write(tmp_path, CLIENTS))
    assert (one.time, one.tenant, one.prompt_tokens, one.output_tokens) == (0.0, "client1", 256, 250)


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    plain = read("azure", write(tmp_path, AZURE_2023))
    assert read("azure", write(tmp_path, gzip.compress(AZURE_2023.encode()), "packed")) == plain
    with pytest.raises(ConfigError, match=r"packed is damaged after line \d"):
        read("azure", write(tmp_path, gzip.compress(AZURE_2023.encode())[:-12], "packed"))


def test_an_unsorted_trace_says_where_and_is_sorted_when_asked(tmp_path: Path) -> None:
    lines = AZURE_2023.splitlines()
    path = write(tmp_path, "\n".join([lines[0], lines[2], lines[1]]))
    with pytest.raises(ConfigError, match=r"line 3, column TIMESTAMP: .* earlier than the line before; give sort=yes"):
        read("azure", path)
    assert [one.prompt_tokens for one in read("azure", path, ",sort=yes")] == [374, 396]
    assert [round(one.time, 3) for one in read("azure", path, ",sort=yes")] == [0, 4.315]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("azure", AZURE_2023.replace(",44", ",many"), "line 2, column GeneratedTokens: 'many'; give a whole number"),
        ("azure", AZURE_2023.replace(",44", ",-4"), "line 2, column GeneratedTokens: '-4'; give a whole number"),
        ("azure", AZURE_2023.replace(",44", ",1e99"), "line 2, column GeneratedTokens"),
        ("azure", AZURE_2023.replace("2023-11-16 18:15:50", "yesterday"), "line 3, column TIMESTAMP: 'yesterday"),
        ("azure", AZURE_2023.replace("ContextTokens", "Context"), "line 1: no column ContextTokens; this format has"),
        ("azure", AZURE_2023.replace(",396,109", ",396"), "line 3: 2 columns where the header has 3"),
        ("azure", "", "line 1: no column TIMESTAMP"),
        ("burstgpt", BURST_1.replace("45,GPT", "soon,GPT"), "line 3, column Timestamp: 'soon'; give a number"),
        ("mooncake", MOONCAKE[:-30], "line 2, column "),
        ("mooncake", MOONCAKE.replace("[0, 1, 2]", '"012"'), "line 1, column hash_ids: '012'; give a list of whole"),
        ("mooncake", MOONCAKE.replace('"input_length": 1024', '"input": 1024'), "line 2, column input_length: missing"),
        ("mooncake", "[1, 2]\n", "line 1: '[1, 2]' is no object; give one JSON object a line"),
        ("serving_sim", SERVING_SIM.replace("46926808", "true"), "line 1, column arrival_time_ns: True; give a number"),
        ("agentic", '{"id": "s", "requests": 3}\n', "line 1, column requests: 3; give a list of objects"),
        ("agentic", AGENT % "[1]", "column hash_runs: [[1]]; give"),
        ("agentic", AGENT % "[1, 99999999]", "give at most 16777216"),
        ("servegen", '{"client": 1, "windows": []}\n', "line 1, column windows: []; give a list of"),
        ("servegen", '{"client": 1, "windows": [[0, 1, 1, "Cauchy", 1, 1]]}\n', "column windows[0]"),
        ("servegen", '{"client": 1, "windows": [[0, 1, 1]], "quantile_pcts": [1]}\n', "column quantiles: missing"),
        ("servegen", "\n", "has no client"),
        ("requests", "[]", "Expected `array` of length >= 1 - at `$[0]`"),
        ("requests", '[{"prompt_token_ids": [], "max_tokens": 3}]', "length >= 1 - at `$[0][0].prompt_token_ids`"),
        ("requests", '[{"prompt_token_ids": [1], "max_token": 3}]', "unknown field `max_token` - at `$[0][0]`"),
        ("requests", '[{"prompt_token_ids": [1], "max_tokens": 0}]', "Expected `int` >= 1 - at `$[0][0].max_tokens`"),
        ("requests", "[[{}], 3]", "Object missing required field `prompt_token_ids`"),
        ("requests", "[", "is not JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_its_line_and_column(
    tmp_path: Path, kind: str, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(kind, write(tmp_path, text))
    assert words in str(caught.value)


FILES = {"azure": AZURE_2023, "burstgpt": BURST_2, "mooncake": MOONCAKE, "serving_sim": SERVING_SIM, "clients": CLIENTS}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_a_file_torn_or_changed_anywhere_is_read_or_refused_with_a_typed_error(
    tmp_path: Path, kind: str, data: st.DataObject
) -> None:
    text = FILES[kind].encode()
    place = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from(["cut", "byte", "drop"]))
    torn = text[:place] if change == "cut" else text[:place] + text[place + 1 :]
    if change == "byte":
        torn = text[:place] + data.draw(st.binary(min_size=1, max_size=3)) + text[place + 1 :]
    try:
        arrivals = read(kind, write(tmp_path, torn))
    except ConfigError as error:
        assert "trace" in str(error)
    else:
        assert all(one.prompt_tokens >= 1 and one.output_tokens >= 1 for one in arrivals)


def test_a_folder_or_a_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read("azure", tmp_path)
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        read("azure", write(tmp_path, b"\xff\xfe\x00\x01"))


def test_agents_wait_for_the_one_that_ended_last(tmp_path: Path) -> None:
    turns = [
        {"t": 0, "in": 130, "out": 9, "api_time": 7.0, "hash_runs": [[1, 2]]},
        {"t": 0, "in": 70, "out": 9, "api_time": 2.0, "hash_runs": [[1, 1]]},
        {"t": 5, "in": 140, "out": 0, "api_time": 9.0, "hash_runs": [[1, 1], [5, 1]]},
        {"t": 30, "in": 300, "out": 9, "hash_runs": [[1, 4]]},
    ]
    sessions = [json.dumps({"id": name, "block_size": 64, "requests": turns}) for name in "ab"]
    arrivals = read("agentic", write(tmp_path, "\n".join(sessions)), ",every=100")
    own = [one for one in arrivals if one.session == "a"]
    places = [arrivals.index(one) for one in own]
    assert [one.follows for one in own] == [None, None, places[1], places[2]]
    assert [one.time for one in own] == [0, 0, 3, 16]
    other = [one for one in arrivals if one.session == "b"]
    assert [one.time for one in other][:2] == [100, 100]
    assert not {*own[0].keys} & {*other[0].keys}  # ids are a session's own
    assert [key - own[0].keys[0] for key in own[2].keys] == [0, 4]


def test_servegen_keeps_each_windows_rate(tmp_path: Path) -> None:
    client = {
        "client": 7,
        "windows": [[0, 4.0, 2.1, "Gamma", 0.23, 0.05], [600, 0, 0], [1200, 1.0, 1.3, "Weibull", 0.8, 0.01]],
        "quantile_pcts": [1, 50, 99],
        "quantiles": {"input_tokens": [10, 10, 10], "output_tokens": [2, 4, 6]},
    }
    arrivals = read("servegen", write(tmp_path, json.dumps(client)))
    counts = [sum(low <= one.time < low + 600 for one in arrivals) for low in (0, 600, 1200)]
    assert counts[0] == pytest.approx(2400, rel=0.12) and counts[1] == 0 and counts[2] == pytest.approx(600, rel=0.15)
    assert arrivals[-1].time < 1800
    assert {one.tenant for one in arrivals} == {"client7"} and {one.prompt_tokens for one in arrivals} == {10}


def test_a_bench_workloads_equal_prompts_share_their_keys(tmp_path: Path) -> None:
    prompt = list(range(40))
    groups = [[{"prompt_token_ids": prompt, "max_tokens": 3}, {"prompt_token_ids": [*prompt[:20], 9], "max_tokens": 8}],
              [{"prompt_token_ids": prompt[:16], "max_tokens": 1}]]  # fmt: skip
    first, second, third = read("requests", write(tmp_path, json.dumps(groups)))
    assert first.keys[0] == second.keys[0] == third.keys[0]
    assert (len(first.keys), len(second.keys), len(third.keys)) == (2, 1, 1)
    assert (first.follows, second.follows, third.follows) == (None, None, 1)


# --- the real files ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "rate"),
    [(NUM_BLOCKS, 0.366), (50_000, 0.355), (30_000, 0.326), (10_000, 0.212), (5_859, 0.136), (1_000, 0.045)],
)
def test_K03_mooncakes_hit_rates_come_out_of_the_reader(num_blocks: int, rate: float) -> None:
    path = public_file("mooncake/conversation_trace.jsonl.gz")
    keys = [[int(key).to_bytes(16, "little") for key in one.keys] for one in read("mooncake", path, ",round=up")]
    found, asked = replay(keys, num_blocks)
    assert round(found / asked, 3) == rate


def test_memory_in_use_on_azures_lengths_with_blocks_of_16() -> None:
    """Whole blocks waste half a block a request: 0.994 of what is held is in use, at the conversations' ends."""
    totals = [
        one.prompt_tokens + one.output_tokens
        for one in read("azure", public_file("azure2023/AzureLLMInferenceTrace_conv.csv.gz"))
    ]
    assert len(totals) == 19_366
    assert int(1000 * sum(totals) / sum(-(-total // 16) * 16 for total in totals)) == 994


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("azure:azure2023/AzureLLMInferenceTrace_code.csv.gz", 8_819),
        ("mooncake:mooncake/conversation_trace.jsonl.gz", 12_031),
        ("agentic:agentic/claude_code_60_sessions.jsonl.gz", 1_707),
        ("clients:vtc/VTC__overload.csv.gz", 1_620),
        ("serving_sim:measured_vllm/workloads/sharegpt-qwen3-32b-300-sps10.lengths.jsonl.gz", 300),
    ],
)
def test_every_request_of_the_public_files_is_read(text: str, count: int) -> None:
    kind, _, name = text.partition(":")
    arrivals = read(kind, public_file(name))
    assert len(arrivals) == count
    assert all(len(one.keys) == one.prompt_tokens // one.key_tokens for one in arrivals if one.key_tokens)


def test_servegens_clients_come_at_the_rate_of_their_windows() -> None:
    path = public_file("servegen/reason_deepseek-r1_top12_clients.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        expected = sum(json.loads(line)["windows"][0][1] for line in lines) * 600
    arrivals = list(open_workload(f"servegen:{path}", Shaping(end=600)))
    assert len(arrivals) == pytest.approx(expected, rel=0.1)
