"""The leak probe: it finds what crosses documents, ranks and time, by the kind of layer, and nothing else."""

from contextlib import nullcontext
from dataclasses import replace
from json import loads
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs, to_builtins
from transformers import AutoConfig, AutoModelForCausalLM

import bench
from analysis.show.markdown import markdown_section
from analysis.show.sections.probe import probe as probe_section
from bench.config import Cell
from bench.measure import PASSES
from bench.measure.probe import leaks
from bench.measure.probe.rank import ProbePass, cut_cell, places_of, probe
from bench.measure.probe.section import Moved, ProbeSection, why_wrong
from bench.plan.experiments.probe import probed_cells
from bench.plan.plan import plan
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, runnable
from bench.training.data import open_data
from bench.training.models import build_model
from tests.support.cells import INSTALLED, TWO_CORES, make_cell, make_raw, run_cell
from tests.support.faults import acts
from tests.support.many_cells import CELLS, run_together
from tests.support.records import as_line
from tests.support.sections import findings_of

PACKING = [
    STRATEGIES[name] for name in INSTALLED if STRATEGIES[name].packs and not STRATEGIES[name].is_optional
]
MISTAKEN = ("ulysses contiguous", "ring zigzag")
"""Of these the mistakes are made, too."""
PROBED_AS_ONES_OWN = "ring zigzag"
FEW = 2
"""Documents with changed tokens, which the tests need no more of."""


def probed(*words):
    """The cells that the experiment plans, tiny ones; of two sequences where the strategy packs so many."""
    cells = probed_cells([make_raw("experiment=probe", "seq_len=64", "batch=2", *words)], TWO_CORES)
    return [cell if refusal(cell) is None else replace(cell, batch=1) for cell in cells]


def ahead(attention):
    """Attention in which each token sees a little of the next one's query."""
    return lambda q, k, v, *, causal=True: attention(q, k, v, causal=causal) + 1e-3 * q.roll(-1, dims=2)


def probe_each(job, log):
    """A rank's whole life: each cell's strategy as it is; some are not told of documents, or look ahead."""
    device = join(job)
    leaks.MAX_DOCUMENTS = FEW
    found = {}
    for name, fields in loads((job.folder / CELLS).read_text()).items():
        cell = Cell.from_flat(fields)
        with log.during(name):
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            with strategy.install() as wiring:
                found[name] = {"right": probe(strategy, wiring, device)}
                if name == PROBED_AS_ONES_OWN:
                    found[name]["own"] = structs.replace(
                        found[name]["right"], moved=probed_shard(strategy, wiring)
                    )
                if name in MISTAKEN:
                    strategy.packed = lambda _: nullcontext()
                    found[name]["withheld"] = probe(strategy, wiring, device)
                    del strategy.packed
                    strategy.attention = ahead(strategy.attention)
                    found[name]["ahead"] = probe(strategy, wiring, device)
    finish_together(device)
    return {
        "found": {
            name: {way: to_builtins(each) for way, each in ways.items()} for name, ways in found.items()
        }
    }


def probed_shard(strategy, wiring):
    """What `bench.probe` counts of the same model on the same ranks, given this one's shard."""
    cell = cut_cell(strategy.cell, strategy.cell.seq_len)
    whole = open_data(cell, torch.device("cpu")).micro_batch(0, 0, 0, cell.seq_len)
    model = build_model(cell.model, attention_name=wiring.attention_name, max_positions=64, seed=cell.seed)
    batch, places = strategy.shard(whole), places_of(whole)
    documents, positions = (
        torch.cat([each[:, piece] for piece in strategy.slices(cell.seq_len)], dim=1)
        for each in (places.documents, places.positions)
    )
    group = strategy.groups.sequence
    with strategy.step(batch):
        return bench.probe(
            model, batch.input_ids, documents, positions, group, position_ids=batch.position_ids
        )


@pytest.fixture(scope="module")
def found(launcher, tmp_path_factory):
    """By strategy and layout what was found of it as it is, and with each mistake."""
    cells = {f"{cell.strategy} {cell.layout}": cell for cell in probed("cluster.world_size=2")}
    ran = run_together(launcher, tmp_path_factory.mktemp("probed"), cells, probe_each)
    assert all(end.report for ends, _ in ran.values() for end in ends), [
        e.failure for e in ran["local contiguous"][0]
    ]
    sections = {}
    for name, (ends, _) in ran.items():
        assert len({str(end.report["found"][name]) for end in ends}) == 1  # all ranks know the same
        ways = ends[0].report["found"][name].items()
        sections[name] = {
            way: ProbeSection(**each | {"moved": {kind: Moved(**row) for kind, row in each["moved"].items()}})
            for way, each in ways
        }
    return sections


def test_the_experiment_is_about_every_strategy_that_packs_in_each_of_its_layouts():
    cells = probed()
    pairs = {(cell.strategy, cell.layout) for cell in cells}
    assert pairs == {(facts.name, layout) for facts in PACKING for layout in facts.layouts}
    assert all(cell.data.packs for cell in cells)
    assert {cell.dtype for cell in cells if cell.strategy != "ring_flash_attn_llama3"} == {"fp32"}
    raws = [
        make_raw("experiment=probe", "sweep_dir=x")
    ]  # a command that names no strategy: an experiment has its own
    assert len(plan(raws, TWO_CORES, single=False, default_strategies=True).cells) == len(pairs)


def test_no_other_cell_is_probed():
    subject = SimpleNamespace(trainer=SimpleNamespace(cell=make_cell("data.packing=documents")))
    ordinary = ProbePass(SimpleNamespace(subject=subject))
    ordinary.before_steps()
    assert ordinary.part() is None
    assert PASSES["probe"].checks(subject.trainer.cell, None) == []


def test_nothing_crosses_documents_in_the_strategies_that_claim_packing(found):
    assert set(found) == {f"{facts.name} {layout}" for facts in PACKING for layout in facts.layouts}
    for name, ways in found.items():
        section = ways["right"]
        assert why_wrong(section) is None, name
        assert (section.noise, set(section.moved)) == (0, {"model", "full_attention"})
        for moved in section.moved.values():
            assert (
                min(moved.other_positions, moved.earlier_positions)
                > moved.own_outputs
                > 0.9 * moved.own_positions
            )
        off = structs.replace(section, loss_error=2 * section.loss_limit)
        assert why_wrong(off).startswith(f"probe: the loss of position {section.loss_position} is off")


@pytest.mark.parametrize("name", MISTAKEN)
def test_documents_that_attention_is_not_told_of_and_tokens_that_see_the_next_one_are_found(found, name):
    withheld, looking_ahead = found[name]["withheld"], found[name]["ahead"]
    assert "outputs of other documents moved" in why_wrong(withheld)
    assert why_wrong(withheld).endswith("in layers of full_attention")
    for moved in withheld.moved.values():
        assert min(moved.other_outputs, moved.other_gradients) > 0
        assert moved.earlier_outputs == 0
    assert withheld.loss_error > 10 * withheld.loss_limit
    assert all(moved.earlier_outputs > 0 for moved in looking_ahead.moved.values())
    assert "outputs of earlier tokens moved" in why_wrong(looking_ahead)


def test_a_model_of_one_s_own_is_probed_on_its_ranks_as_a_cell_is(found):
    ways = found[PROBED_AS_ONES_OWN]
    assert ways["own"].moved == ways["right"].moved


def test_a_cell_whose_documents_cross_has_no_result_and_says_what_moved(launcher, tmp_path):
    (cell,) = probed("strategy=ulysses", "cluster.world_size=2")
    record, _ = run_cell(launcher, cell, tmp_path, entry=acts.withhold_the_documents)
    assert record.status == "wrong_result"
    assert "probe: one token changed" in record.reason


def test_a_cell_without_a_crossing_has_a_section_and_a_row_for_each_kind_of_layer(launcher, tmp_path):
    (cell,) = probed("strategy=ring", "layout=striped", "cluster.world_size=2")
    record, _ = run_cell(launcher, cell, tmp_path)
    assert (record.status, record.reason) == ("ok", None)
    made = {check.what: check.tokens for check in record.checks if check.reason is None}
    assert (made["documents and causality"], made["loss of each position"]) == (64, 64)
    shown = markdown_section(probe_section(findings_of(tmp_path / "sweep", [as_line(record)])))
    for kind in ("model", "full_attention"):
        assert f"| ring | striped | 2 | fp32 | {kind} | 0 of " in shown


NUMBERS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None,
}  # fmt: skip


def test_a_layer_whose_state_crosses_documents_is_told_from_attention_that_does_not():
    kind = "conv"
    config = AutoConfig.for_model("lfm2", **NUMBERS, block_ff_dim=32, layer_types=[kind, "full_attention"])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    documents = torch.arange(4).repeat_interleave(8)[None]
    positions = torch.arange(8).repeat(4)[None]  # transformers tells packed documents by them
    moved = bench.probe(model, torch.arange(32)[None] % 64, documents, position_ids=positions)
    assert set(moved) == {"model", kind, "full_attention"}
    for part in ("model", kind):
        assert min(moved[part].other_outputs, moved[part].other_gradients) > 0
    plain = moved["full_attention"]
    assert (plain.other_outputs, plain.other_gradients, plain.earlier_outputs) == (0, 0, 0)
    assert plain.own_outputs == plain.own_positions
