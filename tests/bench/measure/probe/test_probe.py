"""The leak probe finds effects across documents, ranks and time, by kind of layer."""

import re
from contextlib import nullcontext
from dataclasses import replace
from json import loads
from types import SimpleNamespace

import pytest
import torch
from msgspec import convert, structs, to_builtins
from transformers import AutoConfig, AutoModelForCausalLM

import bench
from analysis.show.markdown import markdown_section
from analysis.show.sections.probe import probe_section
from bench.config import Cell
from bench.measure import PASSES
from bench.measure.probe import leaks
from bench.measure.probe.rank import ProbePass, cut_cell, places_of, probe
from bench.measure.probe.section import ProbeSection, why_wrong
from bench.plan.experiments.probe import probed_cells
from bench.plan.plan import plan
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class
from bench.training.data import open_data
from bench.training.models import build_model
from tests.support.cells import INSTALLED, TWO_CORES, make_cell, make_raw, run_cell
from tests.support.faults import acts
from tests.support.many_cells import CELLS, run_together
from tests.support.records import as_line
from tests.support.sections import findings_of

PACKING = [
    STRATEGIES[name]
    for name in INSTALLED
    if STRATEGIES[name].supports_documents and not STRATEGIES[name].is_optional
]
MISTAKEN = ("ulysses contiguous", "ring zigzag")
"""Strategies and layouts that are also probed with mistakes."""
PUBLIC_PROBE = "ring zigzag"
"""Strategy and layout whose model is also probed by `bench.probe`."""
MAX_DOCUMENTS = 2
"""Number of documents with changed tokens, which is enough for these tests."""


def small_probe_cells(*words):
    """Return the experiment's cells at a small size, with two sequences if the strategy can pack two."""
    cells = probed_cells([make_raw("experiment=probe", "seq_len=64", "batch=2", *words)], TWO_CORES)
    return [cell if refusal(cell) is None else replace(cell, batch=1) for cell in cells]


def look_ahead(attention):
    """Return attention in which each token sees a little of the next token's query."""
    return lambda q, k, v, *, causal=True: attention(q, k, v, causal=causal) + 1e-3 * q.roll(-1, dims=2)


def probe_each(job, log):
    """Probe each cell's strategy; some also without documents, and with a look at the next token."""
    device = join(job)
    leaks.MAX_DOCUMENTS = MAX_DOCUMENTS
    sections = {}
    for name, fields in loads((job.folder / CELLS).read_text()).items():
        cell = Cell.from_flat(fields)
        with log.run_phase(name):
            strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            with strategy.install() as wiring:
                right = probe(strategy, wiring, device)
                sections[name] = variants = {"right": right}
                if name == PUBLIC_PROBE:
                    moved = public_probe(strategy, wiring)
                    variants["public"] = structs.replace(right, moved=moved)
                if name in MISTAKEN:
                    strategy.use_documents = lambda _: nullcontext()
                    variants["withheld"] = probe(strategy, wiring, device)
                    del strategy.use_documents
                    strategy.attention = look_ahead(strategy.attention)
                    variants["ahead"] = probe(strategy, wiring, device)
    finish_together(device)
    return {"sections": to_builtins(sections)}


def public_probe(strategy, wiring):
    """Return the counts of `bench.probe` for the same model and ranks, from this rank's shard."""
    cell = cut_cell(strategy.cell, strategy.cell.seq_len)
    whole = open_data(cell, torch.device("cpu")).micro_batch(0, 0, 0, cell.seq_len)
    model = build_model(cell.model, attention_name=wiring.attention_name, max_positions=64, seed=cell.seed)
    batch, places = strategy.shard(whole), places_of(whole)
    documents, positions = (
        torch.cat([values[:, piece] for piece in strategy.slices(cell.seq_len)], dim=1)
        for values in (places.documents, places.positions)
    )
    group = strategy.groups.sequence
    with strategy.step(batch):
        return bench.probe(
            model, batch.input_ids, documents, positions, group, position_ids=batch.position_ids
        )


@pytest.fixture(scope="module")
def sections(launcher, tmp_path_factory):
    """Return the sections of each strategy and layout, without a mistake and with each mistake."""
    cells = {f"{cell.strategy} {cell.layout}": cell for cell in small_probe_cells("cluster.world_size=2")}
    ran = run_together(launcher, tmp_path_factory.mktemp("probe"), cells, probe_each)
    assert all(end.report for ends, _ in ran.values() for end in ends), [
        end.failure for end in ran["local contiguous"][0]
    ]
    sections = {}
    for name, (ends, _) in ran.items():
        assert len({str(end.report["sections"][name]) for end in ends}) == 1  # all ranks have the same sums
        sections[name] = convert(ends[0].report["sections"][name], dict[str, ProbeSection])
    return sections


def test_probe_experiment_has_every_packing_strategy_and_layout():
    cells = small_probe_cells()
    pairs = {(cell.strategy, cell.layout) for cell in cells}
    assert pairs == {(facts.name, layout) for facts in PACKING for layout in facts.layouts}
    assert all(cell.data.packs for cell in cells)
    assert {cell.dtype for cell in cells if cell.strategy != "ring_flash_attn_llama3"} == {"fp32"}
    raws = [make_raw("experiment=probe", "sweep_dir=x")]  # no strategy named: the experiment has its own
    assert len(plan(raws, TWO_CORES, single=False, default_strategies=True).cells) == len(pairs)


def test_probe_pass_does_nothing_in_other_experiments():
    subject = SimpleNamespace(trainer=SimpleNamespace(cell=make_cell("data.packing=documents")))
    probe_pass = ProbePass(SimpleNamespace(subject=subject))
    probe_pass.before_steps()
    assert probe_pass.part() is None
    assert PASSES["probe"].checks(subject.trainer.cell, None) == []


def test_probe_passes_for_every_packing_strategy(sections):
    assert set(sections) == {f"{facts.name} {layout}" for facts in PACKING for layout in facts.layouts}
    for name, variants in sections.items():
        section = variants["right"]
        assert why_wrong(section) is None, name
        assert (section.noise, set(section.moved)) == (0, {"model", "full_attention"})
        for moved in section.moved.values():
            assert (
                min(moved.other_positions, moved.earlier_positions)
                > moved.own_outputs
                > 0.9 * moved.own_positions
            )
        wrong_loss = structs.replace(section, loss_error=2 * section.loss_limit)
        assert why_wrong(wrong_loss).startswith(f"probe: the loss of position {section.loss_position} is off")


@pytest.mark.parametrize("name", MISTAKEN)
def test_probe_finds_leaks_across_documents_and_from_the_future(sections, name):
    withheld, looking_ahead = sections[name]["withheld"], sections[name]["ahead"]
    assert "outputs of other documents moved" in why_wrong(withheld)
    assert why_wrong(withheld).endswith("in layers of full_attention")
    for moved in withheld.moved.values():
        assert min(moved.other_outputs, moved.other_gradients) > 0
        assert moved.earlier_outputs == 0
    assert withheld.loss_error > 10 * withheld.loss_limit
    assert all(moved.earlier_outputs > 0 for moved in looking_ahead.moved.values())
    assert "outputs of earlier tokens moved" in why_wrong(looking_ahead)


def test_public_probe_counts_the_same_as_the_probe_pass(sections):
    variants = sections[PUBLIC_PROBE]
    assert variants["public"].moved == variants["right"].moved


def test_cell_with_a_leak_is_a_wrong_result(launcher, tmp_path):
    (cell,) = small_probe_cells("strategy=ulysses", "cluster.world_size=2")
    record, _ = run_cell(launcher, cell, tmp_path, entry=acts.withhold_the_documents)
    assert record.status == "wrong_result"
    assert re.search("probe: after changing .* outputs of other documents moved", record.reason)


def test_sound_probe_has_a_report_row_for_each_kind_of_layer(launcher, tmp_path):
    (cell,) = small_probe_cells("strategy=ring", "layout=striped", "cluster.world_size=2")
    record, _ = run_cell(launcher, cell, tmp_path)
    assert (record.status, record.reason) == ("ok", None)
    checks = {check.what: check.tokens for check in record.checks if check.reason is None}
    assert (checks["documents and causality"], checks["loss of each position"]) == (64, 64)
    text = markdown_section(probe_section(findings_of(tmp_path / "sweep", [as_line(record)])))
    for kind in ("model", "full_attention"):
        assert f"| ring | striped | 2 | fp32 | {kind} | 0 of " in text


NUMBERS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None,
}  # fmt: skip


def test_probe_tells_a_leaking_layer_from_sound_attention():
    kind = "conv"
    config = AutoConfig.for_model("lfm2", **NUMBERS, block_ff_dim=32, layer_types=[kind, "full_attention"])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    documents = torch.arange(4).repeat_interleave(8)[None]
    positions = torch.arange(8).repeat(4)[None]  # transformers finds packed documents by restarting positions
    moved = bench.probe(model, torch.arange(32)[None] % 64, documents, position_ids=positions)
    assert set(moved) == {"model", kind, "full_attention"}
    for part in ("model", kind):
        assert min(moved[part].other_outputs, moved[part].other_gradients) > 0
    attention = moved["full_attention"]
    assert (attention.other_outputs, attention.other_gradients, attention.earlier_outputs) == (0, 0, 0)
    assert attention.own_outputs == attention.own_positions
