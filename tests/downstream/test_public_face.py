"""The public interface, as strategy packages, observed loops and readers of records use it.

A test that fails here means that a change breaks the code of users. Add names freely; remove none.
"""

import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import to_builtins

import bench
from bench.common.environment import REPOSITORY
from bench.measure.check import Check
from bench.plan.planned import planned_cell
from bench.record.record import SECTION_NAMES, Failure, Record
from bench.run.cell.outcome import analytic
from bench.run.cell.run import run
from tests.support.cells import TWO_CORES, make_cell
from tests.support.records import as_line

NAMES = {
    "EVERYTHING", "LAYOUTS", "Block", "CallMemory", "Cell", "ConfigError", "Communication", "Flag", "Kernel",
    "ObserveCallback", "Partial", "PlotStyle", "Schedule", "ScheduledFacts", "Stage", "Strategy",
    "StrategyFacts", "Tile", "WholeNumber", "activation_bytes", "backwards_per_step", "forwards_per_step",
    "kernel_backward", "kernel_forward", "observe", "probe", "read_records", "ring_blocks",
}  # fmt: skip
WITH_TORCH = {
    "Kernel", "ObserveCallback", "Partial", "Strategy", "kernel_backward", "kernel_forward", "observe",
    "probe",
}  # fmt: skip
PROMISED = json.loads((Path(__file__).parent / "record_keys.json").read_text())
"""Promised keys of a record and of its sections, as they were when they were promised."""


def test_public_names_are_exactly_these():
    assert set(bench.HOMES) == NAMES
    for name in NAMES:
        assert getattr(bench, name).__class__ is not None
    with pytest.raises(AttributeError, match="'bench' has no attribute 'Offer'"):
        bench.Offer  # noqa: B018

    assert {*dir(bench)} >= NAMES == {*bench.__all__}
    for_editors = [line for line in inspect.getsource(bench).splitlines() if line.startswith("    from ")]
    assert {line.rpartition(" as ")[2] for line in for_editors} == NAMES


def test_public_names_without_torch_do_not_import_it():
    code = f"from bench import {', '.join(NAMES - WITH_TORCH)}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SIGNATURES = {
    "observe": (
        "model, group=None, *, strategy='own', folder='results/observed', steps=20, warmup_steps=2,"
        " report=True"
    ),
    "ObserveCallback": "group=None, **choices",
    "probe": "model, input_ids, documents, positions=None, group=None, **named",
    "read_records": "path",
    "activation_bytes": "cell, heads",
    "forwards_per_step": "cell",
    "backwards_per_step": "cell",
    "kernel_forward": "kernel, q, k, v, *, causal, scale",
    "kernel_backward": "kernel, dout, q, k, v, out, lse, *, causal, scale",
    "Tile": "queries, keys, causal, sequence=None",
    "Partial.first": "out, lse",
    "Partial.merge": "self, rows, out, lse",
    "Cell.option": "self, name",
    "StrategyFacts.ulysses_degree": "self, sp_degree, model",
    "StrategyFacts.causal_masks": "self, layout",
    "StrategyFacts.slices": "self, cell, seq_len, group_rank",
    "StrategyFacts.length_multiple": "self, cell",
    "StrategyFacts.refusals": "self, cell",
    "StrategyFacts.mask_refusals": "self, cell",
    "StrategyFacts.degree_refusals": "self, cell",
    "StrategyFacts.head_refusals": "self, cell",
    "StrategyFacts.communication_bytes": "self, cell",
    "Strategy": "cell, groups, facts",
    "Strategy.attention": "self, q_BNSD, k_BKSD, v_BKSD, *, causal=True",
    "Strategy.log_sum_exp": "self, q_BNSD, k_BKSD, v_BKSD, *, causal=True",
    "Strategy.model_attention": "self, module, q_BNSD, k_BKSD, v_BKSD, **keywords",
    "Strategy.slices": "self, seq_len",
    "Strategy.step": "self, batch",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures_are_stable(name):
    first, _, attribute = name.partition(".")
    function = getattr(bench, first)
    signature = inspect.signature(getattr(function, attribute) if attribute else function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


def test_strategy_facts_have_these_defaults():
    class Mine(bench.StrategyFacts):
        name = "mine"

        def communication_bytes(self, cell):
            return 0

    mine = Mine()
    assert mine.layouts == ("contiguous",)
    assert mine.dtypes == ("bf16", "fp16", "fp32", "fp64")
    assert mine.style is None
    assert (mine.package, mine.kernels, mine.options, mine.shares_sequences) == (None, None, {}, True)
    assert Mine.__abstractmethods__ == frozenset()
    assert bench.StrategyFacts.__abstractmethods__ == {"communication_bytes"}


def test_strategy_has_cell_facts_groups_and_kernel():
    cell, facts, groups = make_cell(), object(), object()

    class Mine(bench.Strategy):
        def attention(self, q_BNSD, k_BKSD, v_BKSD, *, causal=True):
            return q_BNSD

    mine = Mine(cell, groups, facts)
    assert (mine.cell, mine.facts, mine.groups) == (cell, facts, groups)
    assert isinstance(mine.kernel, bench.Kernel)
    promised = {"rank", "world_size", "sequence", "sequence_rank", "ulysses", "ring"}
    assert promised <= inspect.get_annotations(sys.modules["bench.ranks.groups"].RankGroups).keys()


def test_cell_and_layouts_have_these_attributes():
    cell = make_cell("strategy=usp", "cluster.world_size=4", "sp_degree=4", "ulysses_degree=2", "seq_len=1k")
    assert (cell.seq_len, cell.batch, cell.grad_accum, cell.sp_degree) == (1024, 1, 1, 4)
    assert (cell.ulysses_degree, cell.ring_degree, cell.shard_len) == (2, 2, 256)
    assert (cell.layout, cell.kernel, cell.dtype, cell.checkpointing) == (
        "zigzag", "torch_flash", "bf16", False,
    )  # fmt: skip
    assert cell.workload.mask == "causal"
    model = cell.model
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (1, 4, 2, 16)
    assert {*bench.LAYOUTS} == {"contiguous", "zigzag", "striped"}
    tile = bench.LAYOUTS["contiguous"].causal_tile(256, 1, 0)
    assert tile == bench.EVERYTHING == bench.Tile(slice(None), slice(None), causal=False)
    assert bench.LAYOUTS["contiguous"].slices(1024, 4, 1) == (slice(256, 512),)


def assert_promised_keys(sections):
    """Compare the keys of a record and of its sections with the promised ones."""
    for name in sections.keys() & PROMISED.keys():
        assert {*PROMISED[name]} <= {*sections[name]}, name


def test_new_records_have_the_promised_keys(tmp_path):
    """The record is that of a refused cell, which starts no ranks; the sections are as declared."""
    record = as_line(run(planned_cell(make_cell("seq_len=1001"), TWO_CORES), None, tmp_path))
    hints = typing.get_type_hints(Record)
    declared = {name: typing.get_args(hints[name])[0] for name in SECTION_NAMES}
    declared |= {"failure": Failure, "checks": Check}
    fields = {name: section.__struct_fields__ for name, section in declared.items()}
    assert_promised_keys(record | fields | {"record": record, "analytic": to_builtins(analytic(make_cell()))})
    assert fields.keys() | record.keys() >= PROMISED.keys() - {"record"}


def test_reference_records_have_the_promised_keys():
    records = bench.read_records(REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl")
    assert len(records) == 9
    for record in map(as_line, records):
        checks = record["checks"][0] if record.get("checks") else PROMISED["checks"]
        sections = {name: value for name, value in record.items() if isinstance(value, Mapping)}
        assert_promised_keys(sections | {"record": record, "checks": checks})
