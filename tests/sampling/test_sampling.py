"""The sampler against its per-row twin; draws against published numbers; independence of company."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from octavo.core.request import SamplingParams
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.processors import MinTokens
from octavo.sampling.sampler import RawDistribution, Sampled, Sampler
from octavo.sampling.selection import Draws, draw, scale, sorted_candidates, splitmix64, uniforms, weigh
from tests.sampling import per_row

EOS = (2,)
MANY = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=5, seed=2),
    SamplingParams(temperature=1.5, top_p=0.8, seed=3),
    SamplingParams(temperature=0.9, min_p=0.1, seed=4),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.05, seed=5),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, seed=-7),
    SamplingParams(temperature=0.0, logit_bias=((11, 9.0), (3, -100.0))),
    SamplingParams(temperature=2.0, min_tokens=9, stop_token_ids=(5, 10**6), seed=2**64 - 1),
    SamplingParams(temperature=1.0, min_tokens=9, ignore_eos=True, stop_token_ids=(5,), top_k=1, seed=9),
    SamplingParams(temperature=0.01, top_p=0.999, seed=10),
    SamplingParams(temperature=5.0, top_k=2000, seed=11),
    SamplingParams(temperature=5.0, top_p=0.99999, seed=12),
    SamplingParams(temperature=1.0, frequency_penalty=-2.0, logprobs=4, seed=13),
    SamplingParams(temperature=3.0, top_k=300, top_p=0.9, seed=14),
    SamplingParams(temperature=1.3, typical_p=0.4, seed=15),
    SamplingParams(temperature=2.0, typical_p=0.9, top_k=30, min_p=0.01, seed=16),
    SamplingParams(temperature=2.5, typical_p=0.2, top_p=0.95, seed=17),
    SamplingParams(temperature=0.0, dry_multiplier=3.0, dry_allowed_length=1),
    SamplingParams(temperature=1.5, top_n_sigma=0.7, seed=19),
    SamplingParams(temperature=3.0, top_n_sigma=1.5, top_p=0.9, top_k=7, allowed_token_ids=(4, 9, 30, 31), seed=20),
    SamplingParams(temperature=2.0, xtc_probability=1.0, xtc_threshold=0.05, seed=21),
    SamplingParams(temperature=2.0, xtc_probability=0.5, xtc_threshold=0.02, top_p=0.9, seed=22),
    SamplingParams(temperature=2.0, xtc_probability=0.5, xtc_threshold=0.1, typical_p=0.8, top_n_sigma=2, seed=23),
    SamplingParams(temperature=0.0, no_repeat_ngram_size=1),
    SamplingParams(temperature=1.0, no_repeat_ngram_size=2, bad_words_ids=((3,),), seed=24),
    SamplingParams(temperature=0.0, allowed_token_ids=(4, 9, 31, 10**6)),
    SamplingParams(temperature=1.0, allowed_token_ids=(4, 9, 30, 31), typical_p=0.5, seed=18),
    SamplingParams(temperature=0.0, bad_words_ids=(*((token,) for token in range(3, 36)), (10**6, 1))),
]


ONE_ID = SequenceIds(np.zeros(1, dtype=np.int64))


class Rig:
    """Sequences in slots, and a sampler over them."""

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, histories: Sequence[tuple[list[int], list[int]]]
    ):
        self.params, self.histories = params, histories
        ids = torch.zeros((len(params), 64), dtype=torch.int32)
        self.sampler = Sampler(len(params), ids, vocab_size)
        self.processors = self.sampler.processors
        self.ids = ids
        for slot, (one, (prompt, outputs)) in enumerate(zip(params, histories, strict=True)):
            known = prompt + outputs
            ids[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
            known_ids = SequenceIds(np.asarray(prompt, dtype=np.int64), np.asarray(outputs, dtype=np.int64), EOS)
            self.sampler.put(slot, one, known_ids, choice=slot % 3)

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> Sampled:
        positions = [sum(map(len, self.histories[slot])) for slot in slots]
        rows = SamplingRows(np.asarray(slots, dtype=np.int64), np.asarray(positions, dtype=np.int64))
        return self.sampler.sample(logits.clone(), rows)

    def twin(self, logits: torch.Tensor, slot: int) -> int:
        params, (prompt, outputs) = self.params[slot], self.histories[slot]
        values = per_row.edited(logits.tolist(), _known(params, len(logits)), prompt, outputs, EOS)
        place = params.seed or 0, slot % 3, len(prompt) + len(outputs)
        return per_row.pick(values, params, per_row.uniform(*place), per_row.xtc_uniform(*place))


def _known(params: SamplingParams, vocab_size: int) -> SamplingParams:
    stops = tuple(token for token in params.stop_token_ids if token < vocab_size)
    return SamplingParams(**{**{f: getattr(params, f) for f in params.__dataclass_fields__}, "stop_token_ids": stops})


def make_histories(count: int, vocab_size: int, seed: int) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, vocab_size, 1 + n % 7).tolist(), rng.integers(0, min(20, vocab_size), n % 5).tolist())
        for n in range(count)
    ]


def test_P02_splitmix64_gives_the_published_numbers() -> None:
    """Seed 1234567: the reference outputs of Vigna's splitmix64.c."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = np.full(5, 1234567, dtype=np.uint64)
    assert splitmix64(states, np.arange(5, dtype=np.uint64)).tolist() == expected


def test_P02_draws_equal_their_twin_and_these_numbers() -> None:
    seeds, choices, positions = [0, 1, 2**64 - 1, 42], [0, 1, 2, 0], [0, 7, 100000, 1]
    got = uniforms(np.array(seeds, dtype=np.uint64), np.array(choices), np.array(positions))
    assert got.tolist() == [per_row.uniform(*args) for args in zip(seeds, choices, positions, strict=True)]
    # frozen: a change here would change every seeded answer ever given
    assert [f"{u:.12f}" for u in got] == FROZEN


FROZEN = ["0.652448486374", "0.152705311773", "0.216752130262", "0.955746726132"]


def test_P02_draws_are_uniform_and_unrelated() -> None:
    grid = np.arange(40000)
    by_position = uniforms(np.full(40000, 5, np.uint64), np.zeros(40000, np.int64), grid)
    by_seed = uniforms(grid.astype(np.uint64), np.zeros(40000, np.int64), np.full(40000, 9))
    by_choice = uniforms(np.full(40000, 5, np.uint64), grid, np.full(40000, 9))
    for draws in (by_position, by_seed, by_choice):
        counts = np.histogram(draws, bins=50, range=(0, 1))[0]
        assert ((counts - 800) ** 2 / 800).sum() < 100  # chi square with 49 degrees of freedom: p < 1e-5
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.02


@pytest.mark.parametrize("vocab_size", [40, 300, 5000])
@pytest.mark.parametrize("seed", range(6))
def test_P01_every_parameter_equals_the_per_row_twin(vocab_size: int, seed: int) -> None:
    rig = Rig(MANY, vocab_size, make_histories(len(MANY), vocab_size, seed))
    logits = torch.randn(len(MANY), vocab_size, generator=torch.Generator().manual_seed(seed)) * 2.5
    sampled = rig.sample(logits, range(len(MANY)))
    assert sampled.ids_R.tolist() == [rig.twin(logits[slot], slot) for slot in range(len(MANY))]


@pytest.mark.parametrize("seed", range(3))
def test_P01_equals_the_twin_where_most_logits_are_tied(seed: int) -> None:
    vocab_size = 3000
    rig = Rig(MANY, vocab_size, make_histories(len(MANY), vocab_size, seed))
    logits = torch.randint(-2, 3, (len(MANY), vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    sampled = rig.sample(logits, range(len(MANY)))
    assert sampled.ids_R.tolist() == [rig.twin(logits[slot], slot) for slot in range(len(MANY))]


def test_P02_a_row_is_the_same_alone_and_in_any_company() -> None:
    vocab_size = 2000
    rig = Rig(MANY, vocab_size, make_histories(len(MANY), vocab_size, 3))
    logits = torch.randn(len(MANY), vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    together = rig.sample(logits, range(len(MANY))).ids_R.tolist()
    backwards = rig.sample(logits.flip(0), range(len(MANY) - 1, -1, -1)).ids_R.flip(0).tolist()
    alone = [rig.sample(logits[slot : slot + 1], [slot]).ids_R.item() for slot in range(len(MANY))]
    assert together == backwards == alone


def draws_of(
    uniform: Sequence[float], *, top_k: Sequence[int] | int = 0, top_p: Sequence[float] | float = 1.0,
    typical_p: Sequence[float] | float = 1.0, top_n_sigma: float = 0.0, xtc_threshold: float | None = None,
) -> Draws:  # fmt: skip
    num = len(uniform)
    return Draws(
        np.ones(num, dtype=np.float32),
        np.full(num, -np.inf, dtype=np.float32),
        np.broadcast_to(np.asarray(top_k), num).astype(np.int64),
        np.broadcast_to(np.asarray(top_p), num).astype(np.float64),
        np.broadcast_to(np.asarray(typical_p), num).astype(np.float64),
        np.full(num, top_n_sigma),
        np.full(num, xtc_threshold or 0.0),
        np.full(num, xtc_threshold is not None),
        np.asarray(uniform, dtype=np.float64),
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_distributions_do_not_change_by_a_bit_with_the_number_of_rows(threads: int) -> None:
    """Reductions that split one row among threads would; sums of weights are exact."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scores = torch.randn(9, 49152, generator=torch.Generator().manual_seed(0)) * 3
        u, top_k, top_p = np.linspace(0, 1 - 2**-48, 9), np.array([0, 5, 0] * 3), np.linspace(0.3, 0.95, 9)
        plain, cut = draws_of(u), draws_of(u, top_k=top_k, top_p=top_p)
        typical = draws_of(u, top_k=top_k, top_p=top_p, typical_p=top_p[::-1])
        weights = weigh(scale(scores, plain))
        assert torch.equal(weights.sum(dim=1), weights.flip(1).cumsum(dim=1)[:, -1])
        rare = draws_of(u, top_p=top_p, top_n_sigma=2.0, xtc_threshold=0.001)
        for cuts in (plain, cut, typical, rare):
            drawn = draw(scores, cuts)
            for row in range(9):
                one = scores[row : row + 1]
                assert torch.equal(weigh(scale(one, cuts.take(np.array([row])))), weights[row : row + 1])
                assert draw(one, cuts.take(np.array([row]))).item() == drawn[row]
    finally:
        torch.set_num_threads(before)


def test_weights_are_the_exponential_to_float32_and_multiples_of_a_fixed_step() -> None:
    scaled = torch.cat([torch.linspace(-31, 0, 100_001), torch.tensor([-1e30, float("-inf")])])
    weights = weigh(scaled[None])[0]
    assert torch.equal(weights, (weights * 2**34).round() / 2**34) and weights[100_000] == 1
    assert (weights - scaled.double().exp()).abs().max() < 1.3e-7
    exact = scaled.double() > -10
    assert ((weights / scaled.double().exp())[exact] - 1).abs().max() < 2e-6
    assert not weights[100_001:].any() and weights[scaled < -25].sum() == 0


def test_the_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.125, 0.25, 0.0, 0.125])
    many = 16000
    u = uniforms(np.arange(many, dtype=np.uint64), np.zeros(many, np.int64), np.zeros(many, np.int64))
    drawn = draw(probs.log().repeat(many, 1), draws_of(u))
    shares = torch.bincount(drawn, minlength=6) / many
    assert torch.allclose(shares, probs, atol=0.012) and shares[1] == shares[4] == 0


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 700])
def test_extreme_draws_never_give_an_impossible_id(size: int) -> None:
    probs = torch.zeros(3, size)
    probs[:, size // 2] = 0.3
    probs[:, size // 3] = 0.7
    u = np.array([0.0, 0.5, 1 - 2.0**-48])
    drawn = draw(probs.log(), draws_of(u))
    assert (probs.gather(1, drawn[:, None]) > 0).all()
    best = draw(probs.log(), draws_of(u, top_k=[2, 0, 0], top_p=[1.0, 0.999, 0.7]))
    assert (probs.gather(1, best[:, None]) > 0).all()


def test_candidates_are_exact_at_ties() -> None:
    scores = torch.zeros(2, 5000)
    scores[0, 4000:] = 1.0
    scores[1, ::2] = 1.0
    for needed in (1, 63, 64, 200, 4999, 5000):
        values, ids = sorted_candidates(scores, needed)
        expected = torch.sort(scores, dim=1, descending=True, stable=True)
        assert torch.equal(ids[:, :needed], expected.indices[:, :needed])
        assert torch.equal(values[:, :needed], expected.values[:, :needed])


def test_P01_logprobs_are_those_of_the_raw_distribution() -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=3, logit_bias=((7, 100.0),)),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    rig = Rig(params, 300, make_histories(3, 300, 0))
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    sampled = rig.sample(logits, range(3))
    assert sampled.logprob_rows.tolist() == [0, 2] and sampled.logprobs is not None
    biased, plain = sampled.logprobs.entries()
    expected = logits.log_softmax(1)
    order = expected[0].argsort(descending=True, stable=True).tolist()
    assert biased.token_id == 7 and biased.rank == order.index(7) + 1
    assert biased.logprob == pytest.approx(expected[0, 7].item()) and biased.top_ids == tuple(order[:3])
    assert biased.top_logprobs == pytest.approx(expected[0, order[:3]].tolist())
    assert plain.rank == 1 and plain.top_ids == () and plain.token_id == int(logits[2].argmax())


def test_ranks_are_unique_at_ties() -> None:
    raw = RawDistribution(torch.log_softmax(torch.zeros(4, 10), dim=1), np.full(4, 2))
    columns = raw.columns(torch.tensor([0, 1, 2, 9]))
    assert [entry.rank for entry in columns.entries()] == [1, 2, 3, 10]
    assert all(entry.top_ids == (0, 1) for entry in columns.entries())


def test_logprobs_of_many_rows_map_no_fresh_memory_in_each_step() -> None:
    rows, size = 128, 49152  # 24 MiB of logits: counting ranks took 48 MiB of fresh pages beside them in each step
    params = [SamplingParams(temperature=0.0, logprobs=2)] * rows
    rig = Rig(params, size, [([1], [])] * rows)
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(3))

    def step() -> Sampled:
        return rig.sampler.sample(logits, SamplingRows(np.arange(rows), np.full(rows, 1)))

    sampled = step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        sampled = step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults * resource.getpagesize() < 3 * logits.nbytes / 4
    assert sampled.logprobs is not None
    expected = logits.log_softmax(1)
    for row, entry in zip(expected, sampled.logprobs.entries(), strict=True):
        assert entry.rank == 1 and entry.logprob == row.max()


def test_ranks_of_more_rows_than_are_counted_together() -> None:
    logits = torch.randn(21, 49152, generator=torch.Generator().manual_seed(4)).round(decimals=1)  # with ties
    ids = torch.arange(21) * 2000
    entries = RawDistribution(logits.log_softmax(1), np.full(21, 1)).columns(ids).entries()
    orders = logits.log_softmax(1).argsort(dim=1, descending=True, stable=True)
    assert [entry.rank for entry in entries] == [(orders[row] == ids[row]).nonzero().item() + 1 for row in range(21)]


def test_a_row_that_is_not_finite_is_seen_and_hurts_nobody() -> None:
    params = [SamplingParams(temperature=1.0, seed=n, top_p=0.9 if n % 2 else 1.0, logprobs=1) for n in range(4)]
    rig = Rig(params, 300, make_histories(4, 300, 0))
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    clean = rig.sample(logits, range(4)).ids_R
    logits[0, 5], logits[1, 6] = float("nan"), float("inf")
    sampled = rig.sample(logits, range(4))
    assert sampled.best_R.isfinite().tolist() == [False, False, True, True]
    assert sampled.ids_R[2:].equal(clean[2:]) and (sampled.ids_R >= 0).all() and (sampled.ids_R < 300).all()


def test_counts_follow_what_is_sampled_and_rows_are_reused() -> None:
    params = [SamplingParams(temperature=0.0, frequency_penalty=1.0)] * 6
    rig = Rig(params, 50, [([1], [])] * 6)
    logits = torch.zeros(6, 50)
    logits[:, 9] = 2.5
    seen = []
    for length in range(1, 6):
        rows = SamplingRows(np.arange(6), np.full(6, length))
        ids = rig.sampler.sample(logits.clone(), rows).ids_R
        rig.ids[:, length] = ids.int()
        seen.append(ids[0].item())
    assert seen == [9, 9, 9, 0, 1]  # 2.5, 1.5 and 0.5, then below the others
    for slot in range(6):
        rig.sampler.put(slot, params[slot], SequenceIds(np.ones(1, dtype=np.int64), eos=EOS))
    again = rig.sampler.sample(logits.clone(), SamplingRows(np.arange(6), np.full(6, 1))).ids_R
    assert again.tolist() == [9] * 6


@pytest.mark.parametrize("options", [{}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e-40, 1e-46, 1e-300])
def test_a_temperature_that_float32_cannot_hold_is_greedy(temperature: float, options: dict[str, float]) -> None:
    params = SamplingParams(temperature=temperature, seed=1, **options)  # type: ignore[arg-type]
    sampler = Sampler(1, torch.zeros((1, 4), dtype=torch.int32), 300)
    sampler.put(0, params, ONE_ID)
    logits_RV = torch.randn((1, 300), generator=torch.Generator().manual_seed(5))
    best = int(logits_RV.argmax())
    assert best != 0
    assert sampler.sample(logits_RV, SamplingRows(np.array([0]), np.array([1]))).ids_R.tolist() == [best]


def test_a_top_p_of_0_takes_the_likeliest_token() -> None:
    sampler = Sampler(8, torch.zeros((8, 4), dtype=torch.int32), 300)
    for slot in range(8):
        sampler.put(slot, SamplingParams(temperature=5.0, top_p=0, seed=slot), ONE_ID)
    logits_RV = torch.randn((8, 300), generator=torch.Generator().manual_seed(5))
    best = logits_RV.argmax(dim=1).tolist()
    assert sampler.sample(logits_RV, SamplingRows(np.arange(8), np.full(8, 1))).ids_R.tolist() == best


def test_the_largest_numbers_fit_their_columns() -> None:
    sampler = Sampler(1, torch.zeros((1, 4), dtype=torch.int32), 300)
    params = SamplingParams(
        temperature=1.0, top_k=2**31 - 1, min_tokens=2**31 - 1, max_tokens=None, stop_token_ids=(3,)
    )
    sampler.put(0, params, SequenceIds(np.zeros(5, np.int64), eos=EOS))
    ((processor, edited),) = sampler.processors.edits(SamplingRows(np.array([0]), np.array([1000])))
    assert sampler.selection.top_k[0] >= 10**6 and isinstance(processor, MinTokens) and edited.tolist() == [0]


def tied_rows(vocab_size: int, num_above: int, num_tied: int, count: int) -> torch.Tensor:
    """Logits with `num_above` distinct best, then `num_tied` equal ones at random ids, the rest far below."""
    generator = torch.Generator().manual_seed(num_tied)
    rows = []
    for _ in range(count):
        row = torch.full((vocab_size,), -9.0)
        ids = torch.randperm(vocab_size, generator=generator)
        row[ids[:num_above]] = torch.linspace(2.0, 1.0, num_above)
        row[ids[num_above : num_above + num_tied]] = 0.5
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("num_above", [0, 10, 63, 64])
@pytest.mark.parametrize(("top_k", "top_p"), [(64, 1.0), (64, 0.9), (70, 1.0), (0, 0.4), (0, 0.75)])
def test_P01_ties_at_the_edge_of_the_best_64_go_to_the_lowest_ids(num_above: int, top_k: int, top_p: float) -> None:
    """The best 64 are looked at first; which of equal logits are among them is open: such rows are looked at again."""
    count = 24
    logits = tied_rows(1000, num_above, 200, count)
    uniform = np.linspace(0.0, 1.0 - 2**-40, count)
    draws = draws_of(uniform.tolist(), top_k=top_k, top_p=top_p)
    got = draw(logits, draws).tolist()
    for row, u, id in zip(logits, uniform, got, strict=True):
        weights, order = weigh((row - row.max())[None])[0], row.sort(descending=True, stable=True).indices
        sorted_weights = weights[order]
        if top_k:
            sorted_weights[top_k:] = 0.0
        before = sorted_weights.cumsum(0) - sorted_weights
        sorted_weights[before >= top_p * sorted_weights.sum()] = 0.0
        cumulative = sorted_weights.cumsum(0)
        place = int(torch.searchsorted(cumulative, u * cumulative[-1:], right=True))
        assert id == int(order[place])


def test_P04_candidates_that_tie_at_the_edge_of_the_best_64_are_those_of_the_lowest_ids() -> None:
    for num_needed, num_above in ((63, 0), (63, 40), (50, 10), (20, 10)):
        rows = tied_rows(1000, num_above, 200, 8)
        values, ids = sorted_candidates(rows, num_needed)
        right = rows.sort(dim=1, descending=True, stable=True)
        assert torch.equal(ids[:, :num_needed], right.indices[:, :num_needed])
        assert torch.equal(values[:, :num_needed], right.values[:, :num_needed])
