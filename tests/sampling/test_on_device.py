"""Sampling on an emulated accelerator: the ids of a CPU, whatever the parameters, and no wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops.triton import available
from octavo.sampling import sampler, selection
from octavo.sampling.columns import SamplingRows, SequenceIds
from octavo.sampling.processors import TokenMasks
from octavo.sampling.rejection import Rejection
from tests.executors.emulated_device import NAME, Emulator, register, running
from tests.sampling.test_no_waiting import PARAMS
from tests.sampling.test_sampling import EOS

SIZE, LENGTH = 301, 9
ROWS = SamplingRows(np.arange(len(PARAMS)), np.full(len(PARAMS), LENGTH))
MASKS = TokenMasks(np.arange(0, len(PARAMS), 3), np.full((-(-len(PARAMS) // 3), -(-SIZE // 32)), 0x5555_5555, np.int32))


class Both:
    """A sampler on a CPU and one on the device, with slots for all parameters."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        ids_SW = torch.from_numpy(rng.integers(SIZE, size=(len(PARAMS), 40)).astype(np.int32))
        known = ids_SW.numpy().astype(np.int64)
        self.logits_RV = torch.from_numpy(rng.standard_normal((len(PARAMS), SIZE), dtype=np.float32) * 3).round(
            decimals=1
        )
        register()
        self.emulator = Emulator()
        self.host = sampler.Sampler(len(PARAMS), ids_SW, SIZE)
        with running(self.emulator):
            self.device = sampler.Sampler(len(PARAMS), ids_SW.to(NAME), SIZE)
        with running(self.emulator, "put"):
            for made in (self.host, self.device):
                for slot, params in enumerate(PARAMS):
                    made.put(slot, params, SequenceIds(known[slot, :6], known[slot, 6:LENGTH], EOS), choice=slot % 3)
        assert not self.emulator.phases["put"].waits

    def sample(self, rows: SamplingRows, masks: TokenMasks | None = None) -> tuple[sampler.Sampled, sampler.Sampled]:
        with running(self.emulator):
            device_RV = self.logits_RV.to(NAME)
        with running(self.emulator, "sample"):
            on_device = self.device.sample(device_RV, rows, masks)
        happened = self.emulator.phases["sample"]
        assert not happened.waits and not [name for name in happened.launches if ".sort" in name]
        return self.host.sample(self.logits_RV.clone(), rows, masks), on_device


@pytest.fixture(params=["kernels", "twin"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    if request.param == "twin":
        for module in (sampler, selection):
            monkeypatch.setattr(module, "uses_kernels", lambda tensor: False)
    elif not available.is_available():
        pytest.skip("triton is not installed")
    return Both()


@pytest.mark.parametrize("masks", [None, MASKS])
def test_P01_ids_are_those_of_a_cpu(both: Both, masks: TokenMasks | None) -> None:
    host, device = both.sample(ROWS, masks)
    with running(both.emulator):
        assert device.ids_R.tolist() == host.ids_R.tolist()
        assert device.best_R.tolist() == host.best_R.tolist()
        assert host.logprobs is not None and device.logprobs is not None
        for ours, theirs in zip(device.logprobs.entries(), host.logprobs.entries(), strict=True):
            assert (ours.token_id, ours.rank, ours.top_ids) == (theirs.token_id, theirs.rank, theirs.top_ids)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=3e-6)
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=3e-6)


def test_P05_verdicts_about_drafts_are_those_of_a_cpu(both: Both) -> None:
    both.host.rejection = both.device.rejection = Rejection()
    drafts = both.logits_RV.argmax(1).numpy().copy()
    drafts[::4] = -1
    host, device = both.sample(SamplingRows(ROWS.slots, ROWS.positions, drafts))
    with running(both.emulator):
        assert device.ids_R.tolist() == host.ids_R.tolist()


def test_P04_candidates_of_beams_are_those_of_a_cpu(both: Both) -> None:
    with running(both.emulator):
        device_RV = both.logits_RV.to(NAME)
    with running(both.emulator, "candidates"):
        ids_RC, logprobs_RC = both.device.candidates(device_RV, ROWS)
    assert not both.emulator.phases["candidates"].waits
    wanted_ids_RC, wanted_RC = both.host.candidates(both.logits_RV.clone(), ROWS)
    with running(both.emulator):
        assert ids_RC.tolist() == wanted_ids_RC.tolist()
        assert np.allclose(logprobs_RC.tolist(), wanted_RC.tolist(), atol=3e-6)


@pytest.mark.skipif(not available.is_available(), reason="triton is not installed")
def test_plain_rows_are_sampled_from_one_packed_upload() -> None:
    rig = Both()
    plain = np.array([row for row in range(len(PARAMS)) if rig.device.is_plain(ROWS.take(np.array([row])))])
    assert 8 <= len(plain) < len(PARAMS) and not rig.device.is_plain(ROWS)
    wanted = rig.host.sample(rig.logits_RV[plain], ROWS.take(plain))
    packed = torch.from_numpy(rig.device.selection.draws(ROWS.slots[plain], ROWS.positions[plain]).pack())
    with running(rig.emulator):
        logits_RV, packed_KR = rig.logits_RV[plain].to(NAME), packed.to(NAME)
    with running(rig.emulator, "packed") as emulator:
        ids_R, best_R = rig.device.sample_packed(logits_RV, packed_KR)
    happened = emulator.phases["packed"]
    assert happened.launches.total() == 1 and not happened.uploads and not happened.waits
    with running(rig.emulator):
        assert ids_R.tolist() == wanted.ids_R.tolist() and best_R.tolist() == wanted.best_R.tolist()
