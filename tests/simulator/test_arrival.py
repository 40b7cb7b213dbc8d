"""A trace's keys as keys of the scheduler's blocks."""

from __future__ import annotations

from tests.simulator.fakes import limits

from octavo.simulator.arrival import Arrival, block_keys, make_request


def test_equal_keys_at_equal_places_give_equal_block_keys() -> None:
    one = block_keys(Arrival(0, 70, 5, keys=[7, 8, 9], key_tokens=16), 4)
    other = block_keys(Arrival(0, 60, 5, keys=[7, 8, 1], key_tokens=16), 4)
    assert len(one) == 12 and len(other) == 12
    assert one[:8] == other[:8] and not set(one[8:]) & set(other[8:])
    assert len(set(one)) == 12


def test_keys_reach_no_further_than_the_trace_or_the_prompt() -> None:
    assert len(block_keys(Arrival(0, 30, 5, keys=range(9), key_tokens=8), 4)) == 7
    assert len(block_keys(Arrival(0, 300, 5, keys=range(2), key_tokens=8), 4)) == 4
    assert block_keys(Arrival(0, 30, 5), 4) == ()


def test_sizes_that_do_not_divide_each_other_are_named_by_the_key_that_covers_a_blocks_end() -> None:
    coarse = block_keys(Arrival(0, 60, 5, keys=[1, 2, 3, 4, 5], key_tokens=12), 16)
    assert len(coarse) == 3 and len(set(coarse)) == 3
    shorter = block_keys(Arrival(0, 60, 5, keys=[1, 2, 9], key_tokens=12), 16)
    assert shorter[0] == coarse[0] and shorter[1] != coarse[1]  # the second block ends in the third key
    named = block_keys(Arrival(0, 60, 5, keys=[b"a", b"b", b"c"], key_tokens=12), 16)
    assert len(set(named)) == 2


def test_bytes_of_the_blocks_own_size_stay_as_they_are_and_go_on_over_the_outputs() -> None:
    arrival = Arrival(0, 10, 9, keys=[b"a", b"b"], output_keys=[b"c", b"d", b"e"], key_tokens=4)
    assert block_keys(arrival, 4) == (b"a", b"b", b"c", b"d")
    assert make_request("r0", arrival, 0.0, 0, limits()).block_keys == (b"a", b"b", b"c", b"d")
    assert make_request("r0", arrival, 0.0, 0, limits(prefix_caching=False)).block_keys is None


def test_emitted_tokens_of_a_restarted_request_are_kept() -> None:
    resumed = make_request("r0", Arrival(0, 20, 4), 0.0, 2, limits())
    assert resumed.emitted_token_ids is not None and len(resumed.emitted_token_ids) == 2
