"""Measured times are interpolated by size, and a cell's time is put together of them."""

import pytest

from bench.cost.band import Corner, End
from bench.cost.calibrated_speeds import CalibratedSpeeds
from bench.cost.calibration import MICROSECOND, Calibration
from bench.cost.operations import Operation
from bench.cost.prediction import EXPECTED
from bench.strategies.schedule import Block, Exchange
from tests.cells import make_cell

ROWS_OF = {
    # head_dim, queries (and keys); head_dim, queries, keys
    "torch_flash_causal_forward bf16": "16,100,9,10,11\n16,200,36,40,44",
    "torch_flash_full_forward bf16": "16,100,50,18,20,22\n16,100,100,36,40,44\n16,200,100,72,80,88",
    "repeat bf16": "16,100,1,1,1",
    "sum bf16": "64,1000,8,10,12\n64,4000,32,40,50\n256,1000,30,40,50",
    "send any": "1000,50,60,70\n1000000,1000,1100,1200",
    "reduce_scatter bf16": "1000,200,200,200",
    "reduce_scatter fp32": "1000,100,100,100",
    "zero3_layers bf16": "1,30,30,30\n3,70,70,70",
    "zero3_chunks bf16": "1,35,35,35\n9,75,75,75",
    "plain_layers bf16": "1,2,2,2\n3,6,6,6",
    "fresh_memory any": "1000,50,50,50",
    "used_memory any": "1000,20,20,20",
    "hidden_message bf16": "1,40,40,40",
    "hidden_kernel bf16": "1,100,100,100",
    "hidden_both bf16": "1,110,110,110",
}
CALIBRATION = Calibration.of({"tables": ROWS_OF})


def speeds(end=End.EXPECTED):
    return CalibratedSpeeds(CALIBRATION, Corner(end, end, end))


def microseconds(seconds):
    return seconds / MICROSECOND


def operation_us(kind, rows, columns, end=End.EXPECTED):
    return microseconds(speeds(end).operation_s(Operation(kind, rows, columns)))


def block(queries, keys, *, is_causal, kv_heads=4):
    return Block(1, 4, kv_heads, queries, keys, is_causal)


def block_us(each):
    return microseconds(speeds().block_s(each, 16, "torch_flash", number_bytes=2, backward=False))


EXPECTED_US = {
    "a measured size": (("sum", 1000, 64), 10),
    "more rows, by logarithms": (("sum", 2000, 64), 20),
    "more columns": (("sum", 1000, 128), 20),
    "the high end between sizes": (("sum", 2000, 64, End.HIGH), (12 * 50) ** 0.5),
    "beyond the largest size the rate stays": (("sum", 16000, 64), 160),
    "and the band widens": (("sum", 16000, 64, End.HIGH), 200 * 1.1**2),
    "at both ends": (("sum", 16000, 64, End.LOW), 128 / 1.1**2),
    "below the smallest size the time stays": (("sum", 10, 64), 10),
    "an engine's layers without what plain ones take": (("zero3_layers", 5, 1), 30 + 4 * 20 - 2 - 4 * 2),
    "chunks of a loss beyond a layer without them": (("zero3_chunks", 5, 1), 35 + 4 * 5 - 30),
    "a first write beyond any other": (("fresh_memory", 3000, 1), 3 * (50 - 20)),
}


@pytest.mark.parametrize("case", EXPECTED_US)
def test_an_operation_takes_what_the_tables_say_of_its_size(case):
    operation, expected_us = EXPECTED_US[case]
    assert operation_us(*operation) == pytest.approx(expected_us)


def test_a_causal_block_is_a_square_and_with_more_keys_a_rectangle_too():
    assert block_us(block(400, 400, is_causal=True)) == pytest.approx(4 * 4 * 40)
    assert block_us(block(100, 200, is_causal=True)) == pytest.approx(4 * (10 + 40))


def test_fewer_kv_heads_are_repeated_for_the_kernel():
    all_heads = block_us(block(100, 100, is_causal=False))
    assert block_us(block(100, 100, is_causal=False, kv_heads=2)) == pytest.approx(all_heads + 2 * 4)


def test_a_reduction_takes_the_time_of_its_dtype_and_a_message_that_of_its_bytes():
    reduced = Exchange("reduce_scatter", 1000, 2)
    assert microseconds(speeds().exchange_s(reduced, 2)) == pytest.approx(200)
    assert microseconds(speeds().exchange_s(reduced, 4)) == pytest.approx(100)
    assert microseconds(speeds().exchange_s(Exchange("send", 1000, 2), 4)) == pytest.approx(60)


def test_what_is_hidden_is_the_share_that_two_at_once_save():
    assert speeds().hidden_share == pytest.approx((40 + 100 - 110) / 40)


def test_an_engines_message_counts_beyond_the_one_that_its_hooks_had():
    assert microseconds(speeds().state_message_s(Exchange("send", 1000, 2), 2)) == 0
    assert microseconds(speeds().state_message_s(Exchange("send", 10**6, 2), 2)) == pytest.approx(1100 - 60)


def test_cells_are_known_by_their_dtype_kernel_and_engine():
    rows = {f"{name} bf16": "1,1,1,1\n2,2,2,2" for name in ("product", "norm", "fsdp2_update")}
    known = CalibratedSpeeds(
        Calibration.of({"tables": rows | {"torch_flash_causal_forward bf16": "16,1,1,1,1"}}), EXPECTED
    )
    cell = make_cell("strategy=ulysses")
    assert known.knows(cell)
    for words in (["dtype=fp32"], ["kernel=math"], ["engine=ddp"]):
        assert not known.knows(make_cell("strategy=ulysses", *words))
