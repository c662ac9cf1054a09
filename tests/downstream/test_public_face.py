"""What strategy packages, observed loops and readers of records rely on, as they see it: from outside.

A test that fails here is a change that breaks somebody else's code. Add to it freely; take nothing away.
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
TOLD = json.loads((Path(__file__).parent / "record_keys.json").read_text())
"""The keys of a record and of each of its sections, as written on the day they were promised."""


def test_the_names_are_there_and_no_others():
    assert set(bench.HOMES) == NAMES
    for name in NAMES:
        assert getattr(bench, name).__class__ is not None
    with pytest.raises(AttributeError, match="'bench' has no attribute 'Offer'"):
        bench.Offer  # noqa: B018

    assert {*dir(bench)} >= NAMES == {*bench.__all__}
    of_editors = [line for line in inspect.getsource(bench).splitlines() if line.startswith("    from ")]
    assert {line.rpartition(" as ")[2] for line in of_editors} == NAMES


def test_what_a_plan_reads_imports_no_torch():
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
def test_what_is_called_or_overridden_keeps_its_signature(name):
    first, _, attribute = name.partition(".")
    function = getattr(bench, first)
    signature = inspect.signature(getattr(function, attribute) if attribute else function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


def test_a_strategys_facts_start_from_these_defaults():
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


def test_a_strategy_finds_these_in_itself():
    """`self.cell`, `self.facts`, `self.kernel`, and the ranks in `self.groups`."""
    cell, facts, groups = make_cell(), object(), object()

    class Mine(bench.Strategy):
        def attention(self, q_BNSD, k_BKSD, v_BKSD, *, causal=True):
            return q_BNSD

    mine = Mine(cell, groups, facts)
    assert (mine.cell, mine.facts, mine.groups) == (cell, facts, groups)
    assert isinstance(mine.kernel, bench.Kernel)
    promised = {"rank", "world_size", "sequence", "sequence_rank", "ulysses", "ring"}
    assert promised <= inspect.get_annotations(sys.modules["bench.ranks.groups"].RankGroups).keys()


def test_a_cell_and_a_layout_have_these():
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


def assert_told(found):
    """Compare the keys of a record and of its sections with those that were promised."""
    for section in found.keys() & TOLD.keys():
        assert {*TOLD[section]} <= {*found[section]}, section


def test_records_have_the_keys_that_were_promised(tmp_path):
    """Of a refused cell, which starts no ranks; and of the sections as they are declared."""
    record = as_line(run(planned_cell(make_cell("seq_len=1001"), TWO_CORES), None, tmp_path))
    hints = typing.get_type_hints(Record)
    declared = {name: typing.get_args(hints[name])[0] for name in SECTION_NAMES}
    declared |= {"failure": Failure, "checks": Check}
    found = {name: kind.__struct_fields__ for name, kind in declared.items()}
    assert_told(record | found | {"record": record, "analytic": to_builtins(analytic(make_cell()))})
    assert found.keys() | record.keys() >= TOLD.keys() - {"record"}


def test_records_of_the_reference_are_readable_and_have_them_too():
    records = bench.read_records(REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl")
    assert len(records) == 9
    for record in map(as_line, records):
        checks = record["checks"][0] if record.get("checks") else TOLD["checks"]
        sections = {name: each for name, each in record.items() if isinstance(each, Mapping)}
        assert_told(sections | {"record": record, "checks": checks})
