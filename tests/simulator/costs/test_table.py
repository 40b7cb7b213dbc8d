"""Operators measured on a device: interpolation, what a step runs, skewed lengths, and the files' faults."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.simulator.cost_model import ScaledCosts, StepShape
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.table import Interpolator, Skew
from octavo.simulator.rows import FileRow

DENSE = """layer,tokens,time_us
qkv_proj,1,10
qkv_proj,11,20
layernorm,1,1
layernorm,11,1
embedding,1,5
embedding,11,5
"""
PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,100\nlm_head,3,200\n"
ATTENTION = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,16,2
0,0,1,116,12
0,0,3,16,6
0,0,3,116,36
16,0,0,0,4
16,100,0,0,8
32,0,0,0,6
32,100,0,0,10
16,0,1,16,9
16,0,3,16,11
32,0,1,16,13
32,0,3,16,15
"""
US = 1e-6


def write(folder: Path, **files: str) -> str:
    """A table of one layer, some of its files as given."""
    texts = {
        "dense.csv": DENSE, "per_sequence.csv": PER_SEQUENCE, "attention.csv": ATTENTION,
        "profile.json": '{"num_layers": 2}',
    }  # fmt: skip
    texts.update({name.replace("_csv", ".csv").replace("_json", ".json"): text for name, text in files.items()})
    for name, text in texts.items():
        (folder / name).write_text(text)
    return f"table:{folder}"


def test_values_between_points_are_on_the_line_and_beyond_them_too() -> None:
    known = Interpolator({(1, 10): 1.0, (1, 20): 2.0, (3, 10): 5.0})
    assert known.at(1, 15) == 1.5
    assert known.at(1, 40) == 4.0
    assert known.at(0, 15) == 1.5  # the first row holds below it
    assert known.at(2, 15) == 3.25  # between 1.5 and the second row's only point
    assert known.at(9, 10) == 17.0
    assert Interpolator({(1,): 3.0, (2,): 1.0}).at(100) == 0.0


def test_a_step_runs_every_operator_as_often_as_a_model_does(tmp_path: Path) -> None:
    costs = cost_model(write(tmp_path))
    once, layers = 5 + 100, 2 * (10 + 2 * 1 + 2)
    assert costs.step_s(StepShape([16], [], 1)) == pytest.approx((once + layers) * US)


def test_mean_lengths_rows_and_tokens_are_interpolated(tmp_path: Path) -> None:
    costs = cost_model(write(tmp_path))
    once, layers = 5 + 150, 2 * (11 + 2 + (4 + 24) / 2)
    assert costs.step_s(StepShape([66, 66], [], 2)) == pytest.approx((once + layers) * US)


def test_a_chunk_meets_decode_rows_in_the_table_and_further_chunks_add_to_it(tmp_path: Path) -> None:
    costs = cost_model(write(tmp_path, dense_csv="layer,tokens,time_us\nqkv_proj,1,0\n"))
    alone = costs.step_s(StepShape([], [(24, 50)], 1))
    assert alone == pytest.approx((100 + 2 * 7) * US)
    met = costs.step_s(StepShape([16, 16], [(24, 0)], 3))
    assert met == pytest.approx((200 + 2 * 12) * US)
    further = costs.step_s(StepShape([16, 16], [(24, 0), (16, 100)], 3))
    assert further - met == pytest.approx((50 + 2 * (8 - 4)) * US)


def test_steps_are_padded_to_captured_sizes(tmp_path: Path) -> None:
    plain = cost_model(write(tmp_path))
    padded = cost_model(write(tmp_path, profile_json=json.dumps({"num_layers": 2, "padded_tokens": [4, 11]})))
    three, eleven = StepShape([16] * 3, [], 3), StepShape([16] * 3, [(8, 0)], 3)
    assert padded.step_s(three) - plain.step_s(three) == pytest.approx(2 * 1 * US)
    assert padded.step_s(eleven) == plain.step_s(eleven)


def test_devices_that_share_a_layer_tell_each_other_twice_in_each(tmp_path: Path) -> None:
    profile = {"num_layers": 2, "hidden_size": 50, "tp": 2, "all_reduce_s": 1e-3, "all_reduce_bandwidth": 1e5}
    shape = StepShape([16], [], 1)
    alone = cost_model(write(tmp_path)).step_s(shape)
    shared = cost_model(write(tmp_path, profile_json=json.dumps(profile))).step_s(shape)
    assert shared - alone == pytest.approx(2 * 2 * (1e-3 + 100 / 1e5))


def test_a_model_and_a_device_fill_in_what_the_profile_leaves_out(tmp_path: Path) -> None:
    spec = write(tmp_path)
    (tmp_path / "profile.json").unlink()
    with pytest.raises(ConfigError, match="does not say num_layers"):
        cost_model(spec)
    step_s = cost_model(spec, Hardware.of("llama-3.1-8b", "l4")).step_s(StepShape([16], [], 1))
    assert step_s == pytest.approx((5 + 100 + 32 * 14) * US)


def test_rows_of_unequal_lengths_lie_between_the_mean_and_the_greatest(tmp_path: Path) -> None:
    skew = (
        "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples\n"
        "0,n<=4,sr<=40%,kvB<=1k,kp=0,0.5,1\n0,n<=4,sr>70%,kvB<=1k,kp=0,7,1\n"
    )
    even = cost_model(write(tmp_path)).step_s(StepShape([16, 16, 76], [], 3))
    costs = cost_model(write(tmp_path, skew_fit_csv=skew))
    longest = 3 * (2 + 60 * 0.1)
    mean = 3 * (2 + 20 * 0.1)
    assert costs.step_s(StepShape([16, 16, 76], [], 3)) - even == pytest.approx(2 * 0.5 * (longest - mean) * US)
    assert costs.step_s(StepShape([36, 36, 36], [], 3)) == pytest.approx(even)


def test_a_share_is_never_more_than_all_and_unknown_buckets_have_the_mean() -> None:
    labels = {"n_label": "n<=4", "skew_rate_label": "sr>70%", "kv_big_label": "kvB<=1k", "kp_label": "kp=0"}
    rest = {"pc": "0", "alpha": "7", "n_samples": "1"}
    skew = Skew([FileRow(Path("skew_fit.csv"), 2, {**labels, **rest})])
    assert skew.share(0, 4, (90, 10, 100), 0) == 1.0
    assert skew.share(0, 4, (10, 10, 10), 0) == 0.0
    with pytest.raises(ConfigError, match="line 2, column n_label: 'many'; give a label such as"):
        Skew([FileRow(Path("skew_fit.csv"), 2, {**labels, **rest, "n_label": "many"})])


def test_without_skew_the_fast_path_equals_the_slow_one(tmp_path: Path) -> None:
    costs = cost_model(write(tmp_path))
    assert costs.decode_s is not None
    assert costs.decode_s(3, 99) == costs.step_s(StepShape([16, 33, 50], [], 3))


def test_a_prefix_names_one_table_of_several_and_files_may_be_compressed(tmp_path: Path) -> None:
    for name, text in (("dense.csv", DENSE), ("per_sequence.csv", PER_SEQUENCE), ("attention.csv", ATTENTION)):
        (tmp_path / f"card__{name}.gz").write_bytes(gzip.compress(text.encode()))
    costs = cost_model(f"table:{tmp_path}/card", Hardware.of("llama-3.1-8b", "l4"))
    assert costs.name == "table:card"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("dense_csv", "layer,tokens\nqkv,1\n", "dense.csv, line 1: no column time_us"),
        ("dense_csv", "layer,tokens,time_us\nqkv,one,3\n", "dense.csv, line 2, column tokens: 'one'"),
        ("dense_csv", "layer,tokens,time_us\nqkv,1,-3\n", "dense.csv, line 2, column time_us: '-3'"),
        ("dense_csv", "layer,tokens,time_us\nqkv,1\n", "dense.csv, line 2: 2 columns where the header has 3"),
        ("dense_csv", "layer,tokens,time_us\n", "dense.csv has no rows"),
        ("attention_csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,1\n", "no row with n_decode"),
        ("attention_csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,1\n", "no row with a prefill"),
        ("profile_json", "{", "profile.json"),
        ("profile_json", '{"layers": 2}', "give an object of active_experts"),
        ("profile_json", '{"num_layers": -2}', "number of 0 or more"),
        ("profile_json", '{"num_layers": 2, "padded_tokens": 5}', "number of 0 or more"),
    ],
)
def test_a_damaged_table_is_refused_with_its_place(tmp_path: Path, file: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost_model(write(tmp_path, **{file: text}))


def test_a_missing_or_torn_file_is_named(tmp_path: Path) -> None:
    spec = write(tmp_path)
    (tmp_path / "dense.csv").unlink()
    with pytest.raises(ConfigError, match=r"no dense.csv or dense.csv.gz"):
        cost_model(spec)
    (tmp_path / "dense.csv.gz").write_bytes(gzip.compress(DENSE.encode())[:-9])
    with pytest.raises(ConfigError, match=r"dense.csv.gz is damaged after line"):
        cost_model(spec)


EXPERTS = """tokens,activated_experts,time_us
1,2,10
1,4,20
3,2,14
3,4,24
"""
ROUTED = {"num_layers": 2, "num_experts": 4, "active_experts": 2}


def test_experts_take_the_time_of_those_that_the_tokens_are_expected_to_use(tmp_path: Path) -> None:
    plain = cost_model(write(tmp_path))
    routed = cost_model(write(tmp_path, moe_csv=EXPERTS, profile_json=json.dumps(ROUTED)))
    one, two = StepShape([16], [], 1), StepShape([16, 16], [], 2)
    assert routed.step_s(one) - plain.step_s(one) == pytest.approx(2 * 10 * US)
    # Two tokens with 2 of 4 experts each leave out a quarter: 3 experts; tokens between 1 and 3.
    assert routed.step_s(two) - plain.step_s(two) == pytest.approx(2 * 17 * US)
    assert routed.decode_s is not None
    assert routed.decode_s(2, 32) == pytest.approx(routed.step_s(two))


def test_ranks_compute_the_tokens_of_all_over_their_own_experts_and_exchange_them_twice(tmp_path: Path) -> None:
    plain = cost_model(write(tmp_path))
    link = {"hidden_size": 50, "ep": 2, "exchange_s": 1e-3, "exchange_bandwidth": 1e5}
    routed = cost_model(write(tmp_path, moe_csv=EXPERTS, profile_json=json.dumps({**ROUTED, **link})))
    own, met = StepShape([16], [], 1), StepShape([16], [], 1, peer_tokens=(3,))
    # 4 tokens use 4 (1 - 1/16) = 3.75 of 4 experts: 1.875 of the device's 2 (below the table: 2), for 2 tokens' worth.
    assert routed.step_s(met) - plain.step_s(own) == pytest.approx(2 * (12 * US + 2 * (1e-3 + 3 * 100 / 1e5)))


def test_all_ranks_are_padded_to_one_captured_size_or_none_is(tmp_path: Path) -> None:
    fields = {**ROUTED, "hidden_size": 50, "exchange_bandwidth": 1e5, "padded_tokens": [2, 3]}
    routed = cost_model(write(tmp_path, moe_csv=EXPERTS, profile_json=json.dumps(fields)))
    small, large = StepShape([16], [], 1, peer_tokens=(3,)), StepShape([16], [], 1, peer_tokens=(4,))
    once = 5 + 100
    padded = 12 + 2 + 2 + 14 + 3 * 2 + (3.9375 - 2) / 2 * 10  # 3 and 3 tokens, beyond the table's last two
    plain = 10 + 2 + 2 + 14 + 2 * 2 + (3.875 - 2) / 2 * 10  # 1 and 4 tokens
    assert routed.step_s(small) == pytest.approx((once + 2 * padded) * US + 2 * 2 * 3 * 100 / 1e5)
    assert routed.step_s(large) == pytest.approx((once + 2 * plain) * US + 2 * 2 * 4 * 100 / 1e5)


def test_experts_need_a_model_with_experts_and_whole_ones_on_each_rank(tmp_path: Path) -> None:
    spec = write(tmp_path, moe_csv=EXPERTS)
    with pytest.raises(ConfigError, match="does not say num_experts and active_experts"):
        cost_model(spec)
    hardware = Hardware.of("qwen3-30b-a3b", "h100")
    assert cost_model(spec, hardware).step_s(StepShape([16], [], 1)) > 0
    with pytest.raises(ConfigError, match="2 ranks hold slices of them; give --enable-expert-parallel"):
        cost_model(spec, replace(hardware, dp=2))
    (tmp_path / "moe.csv").write_text("tokens,activated_experts,time_us\n")
    with pytest.raises(ConfigError, match=r"moe\.csv has no rows"):
        cost_model(spec)
    (tmp_path / "moe.csv").unlink()
    with pytest.raises(ConfigError, match=r"no moe.csv, and qwen3-30b-a3b has 128 experts"):
        cost_model(spec, hardware)


def test_a_scaled_model_is_the_other_one_stretched() -> None:
    costs = cost_model("roofline", Hardware.of("llama-3.1-8b", "l4"))
    scaled = ScaledCosts(costs, 2.0)
    shape = StepShape([10, 20], [], 2)
    assert scaled.step_s(shape) == 2 * costs.step_s(shape)
    assert scaled.decode_s is not None
    assert scaled.decode_s(2, 30) == scaled.step_s(shape)
    assert scaled.host_s(shape) == costs.host_s(shape)
    by_name = cost_model("roofline*2.5", Hardware.of("llama-3.1-8b", "l4"))
    assert by_name.step_s(shape) == 2.5 * costs.step_s(shape)
    assert by_name.name == f"{costs.name}*2.5"
    with pytest.raises(ConfigError, match="cost factor is 0"):
        ScaledCosts(costs, 0)
    with pytest.raises(ConfigError, match="'twice' is no factor"):
        cost_model("roofline*twice", Hardware.of("llama-3.1-8b", "l4"))
