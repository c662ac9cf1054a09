"""The store drops an incomplete last line, and any other invalid line is an error that names it."""

import json
import os
import re

import pytest

from bench.common.environment import describe_environment
from bench.config import ConfigError
from bench.record.analytic import Analytic
from bench.record.record import SCHEMA_VERSION, Provenance, Record, Role, Status
from bench.record.store import Store, StoreError, line_of, read_records


def make_record(cell_id="c0ffee", **changes):
    fields = {
        "schema_version": SCHEMA_VERSION, "cell_id": cell_id, "experiment": "none", "role": Role.CELL,
        "repeat": 0, "order": 0, "status": Status.OK, "reason": None, "provenance": Provenance.MEASURED,
        "config": {"seq_len": 8, "strategy": "ring"}, "environment": describe_environment({}),
        "analytic": Analytic(tokens_per_step=8), "started_at": "2026-11-21T00:00:00+00:00",
        "wall_s": 1.0, "fixed_cost_s": 0.5,
    }  # fmt: skip
    return Record(**fields | changes)


@pytest.mark.fault(16)
def test_torn_line_loses_only_itself(tmp_path):
    with Store(tmp_path) as store:
        store.append(make_record("a"))
        whole = len(store.path.read_bytes())
        store.append(make_record("b"))
        both = store.path.read_bytes()
        for cut in range(whole + 1, len(both), 7):
            store.path.write_bytes(both[:cut])
            with pytest.warns(UserWarning, match="torn last line"):
                assert [record.cell_id for record in store.read()] == ["a"]
            store.append(make_record("c"))
            assert [record.cell_id for record in store.read()] == ["a", "c"]
        store.path.write_bytes(b"no line")
        store.append(make_record("d"))
        assert [record.cell_id for record in store.read()] == ["d"]


WHOLE = json.loads(line_of(make_record("a")))
LINES = {
    "{": "not a record",
    "[]": "Expected `object`, got `array`",
    '{"schema_version":0}': "schema_version 0",
    '{"schema_version":1,"wall_s":NaN}': "not a record",
    "\xff": "not a record",
    json.dumps({"schema_version": SCHEMA_VERSION}): "missing required field `cell_id`",
    json.dumps(WHOLE | {"status": "fine"}): "Invalid enum value 'fine'",
    json.dumps(WHOLE | {"repeat": "first"}): "Expected `int`, got `str` at `repeat`",
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.fault(17)
def test_corrupt_line_error_names_its_number(tmp_path, line):
    path = tmp_path / "records.jsonl"
    good = json.dumps(WHOLE)
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="latin-1")
    with pytest.raises(StoreError, match=rf"records\.jsonl:2: .*{re.escape(LINES[line])}"):
        read_records(path)


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', 'a "quote": b', "\\", "caf\u00e9\u2028\x00"])
def test_record_text_survives_the_round_trip(tmp_path, text):
    with Store(tmp_path) as store:
        store.append(make_record(reason=text, experiment=os.fsdecode(b"no /folder\xff")))
        (line,) = store.read()
    assert (line.reason, line.experiment) == (text, "no /folder?")


@pytest.mark.fault(17)
def test_nan_outside_of_sections_is_refused(tmp_path):
    with Store(tmp_path) as store, pytest.raises(ValueError, match="JSON"):
        store.append(make_record(wall_s=float("nan")))


@pytest.mark.fault(14)
def test_store_allows_one_writer(tmp_path):
    with Store(tmp_path), pytest.raises(ConfigError, match="another process is writing"), Store(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()
