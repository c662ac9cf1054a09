"""Attention is compared with float64 at the length that is measured, in the cell's own step."""

import multiprocessing
import os
import re
import resource

import numpy as np
import pytest
import torch

from bench.passes import PASSES
from bench.passes.full_length.comparison import drawn
from bench.passes.full_length.rank import FullLengthPass
from bench.passes.full_length.rows import Rows
from bench.ranks.memory_limit import process_bytes
from tests import late_faults
from tests.cells import make_cell, run_cell, tiny_cell

LONG = ("seq_len=2k", "engine=ddp", "cluster.world_size=2")
FAULTS = {
    late_faults.scale_long_scores: ("ring", "out of the sampled rows is off"),
    late_faults.forget_the_mask_of_long_sequences: ("ulysses", "out of the sampled rows is off"),
    late_faults.enlarge_long_key_gradients: ("ring", "dk and dq disagree"),
    late_faults.enlarge_long_value_gradients: ("ulysses", "dv and out disagree"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_wrong_only_beyond_the_parity_check_is_a_wrong_result(launcher, tmp_path, fault):
    strategy, said = FAULTS[fault]
    record, _ = run_cell(launcher, tiny_cell(f"strategy={strategy}", *LONG), tmp_path, fault)
    assert record.status == "wrong_result"
    assert re.search(f"attention at 2,048 tokens: {said}", record.reason)
    assert record.sections["timing"] is None


def test_attention_alone_is_held_to_the_same(launcher, tmp_path):
    """The attention pass looks at out and dq only."""
    cell = tiny_cell("workload=attention", "strategy=ulysses", "seq_len=2k", "cluster.world_size=2")
    record, _ = run_cell(launcher, cell, tmp_path, late_faults.enlarge_long_key_gradients)
    assert (record.status, "dk and dq disagree" in record.reason) == ("wrong_result", True)


@pytest.mark.parametrize("strategy", ["local", "ring", "deepspeed_ulysses"])
def test_a_sound_strategy_errs_about_as_much_as_its_control(launcher, tmp_path, strategy):
    cell = tiny_cell(f"strategy={strategy}", "seq_len=2k", "engine=zero3", "checkpointing=true")
    record, _ = run_cell(launcher, cell, tmp_path)
    found = record.sections["full_length"]
    assert (record.status, found.reason, found.tokens) == ("ok", None, 2048), record.reason
    assert found.errors.keys() == {"out", "dq", "dk", "dv"}
    assert found.rows == 32
    assert 0 < found.errors["out"] < found.limits["out"] < 0.01


def test_no_number_passes_as_no_error():
    facts = PASSES["full_length"]
    section = facts.part(tokens=4, rows=1, errors={"dq": float("nan")}, limits={"dq": 1.0})
    assert facts.gate(make_cell(), section) is not None


def test_a_row_is_that_of_attention_and_of_its_gradient():
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    out = ((q @ k.transpose(1, 2)) * 8**-0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v
    (dq,) = torch.autograd.grad(out, q, dout)
    picked = torch.tensor([0, 5, 23])
    with torch.no_grad():
        rows = Rows(q[:, picked], k, v, dout[:, picked], ~mask[picked], q.shape[-1] ** -0.5)
        found_out, found_dq = rows.exact()
    assert torch.allclose(found_out, out[:, picked], rtol=0, atol=1e-14)
    assert torch.allclose(found_dq, dq[:, picked], rtol=0, atol=1e-14)


def test_every_seed_samples_other_tokens_and_the_last():
    draws = [drawn(2048, 8, seed) for seed in range(8)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 8
    assert {len(set(draw.tolist())) for draw in draws} == {8}
    assert {int(draw[-1]) for draw in draws} == {2047}


COPIED_BYTES = 64 * 2**20


def copy_under_a_limit(x):
    """A process's whole life: it ends with 0 if the copy has room and nothing else of its size does."""
    captured = FullLengthPass(measurement=None).captured
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (process_bytes("VmData") + COPIED_BYTES // 2, hard))
    captured.keep(q=x)
    try:
        np.ones(COPIED_BYTES, dtype=np.int8)
    except MemoryError:
        os._exit(0)
    os._exit(2)


def test_what_is_copied_for_the_check_does_not_count_in_a_memory_limit():
    x = torch.from_numpy(np.ones(COPIED_BYTES // 4, dtype=np.float32))
    process = multiprocessing.get_context("fork").Process(target=copy_under_a_limit, args=(x,))
    process.start()
    process.join()
    assert process.exitcode == 0
