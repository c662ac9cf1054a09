"""A record has the sections of the passes, and all reference records can be decoded."""

import typing

import pytest
from msgspec import ValidationError, convert

from bench.common.environment import REPOSITORY
from bench.measure import PASSES
from bench.record.record import SECTION_NAMES, Record
from bench.record.store import read_records
from tests.support.records import make_record, make_trace, whole

HINTS = typing.get_type_hints(Record)
REFERENCE = sorted((REPOSITORY / "results" / "reference").rglob("records.jsonl"))


@pytest.mark.parametrize("name", SECTION_NAMES)
def test_record_section_has_the_type_of_its_pass(name):
    merged = typing.get_type_hints(type(PASSES[name]).merge)["return"]
    expected = PASSES[name].part_type if isinstance(merged, typing.TypeVar) else merged
    assert HINTS[name] == expected | None


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.parent.name)
def test_reference_records_have_the_current_schema(path):
    assert read_records(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"seq_len": 0, "strategy": "ring"}}, r"Expected `int` >= 1 - at `\$.config.seq_len`"),
        ({"timing": {"step_times_ms": [[-1.0]], "window_ms": [1.0], "warmup": "full"}}, "> 0.0"),
        ({"timing": {"step_times_ms": [[1.0]], "window_ms": [1.0], "warmup": "full"}}, "`tokens_per_step`"),
        ({"memory": {"peak_allocated_bytes": [-1]}}, ">= 0"),
        ({"memory": {"peak_allocated_bytes": None, "peak_phase": ["forward"]}}, "a size for each phase"),
        ({"losses": {"loss": []}}, "length >= 1"),
        ({"telemetry": {"power_w": []}}, "length >= 1"),
        (
            {"trace": make_trace(1) | {"compute_ms": {"attention": [1.0]}}},
            "compute_ms with attention, packing",
        ),
        ({"parity": {"tokens": 8, "errors": {"out": 0.1}, "limits": {}}}, "a limit for each"),
    ],
)
def test_record_with_an_invalid_number_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        convert(whole(make_record() | changes), Record)
