"""What a step hides: a link carries one message at a time."""

import pytest

from bench.cost.band import End
from bench.cost.calibrated_speeds import speeds_of
from bench.cost.time import state_bytes, step_parts, step_work
from bench.request.hardware import hardware_of
from tests.cells import make_cell


@pytest.mark.parametrize(("hardware", "length"), [("h100_80gb", "64k"), ("l20", "8k")])
@pytest.mark.parametrize("strategy", ["ring", "gather_kv", "ulysses"])
def test_kernels_hide_no_more_messages_than_the_link_carries_while_they_run(hardware, length, strategy):
    """Those of attention and of the engine together."""
    cell = make_cell(
        "mode=predict", f"hardware={hardware}", "cluster.world_size=8", "model=qwen3_4b",
        f"strategy={strategy}", f"seq_len={length}",
    )  # fmt: skip
    work, speeds = step_work(cell), speeds_of(hardware_of(hardware), End.EXPECTED)
    parts = step_parts(cell, work, speeds)
    state_s = sum(
        each.count * speeds.state_message_s(each.exchange, state_bytes(cell)) for each in work.messages
    )
    hidden_ms = parts.hidden_transfer_ms + 1e3 * state_s - parts.model_state_ms
    assert 0 < hidden_ms <= (parts.attention_ms + parts.other_compute_ms) * (1 + 1e-9)
