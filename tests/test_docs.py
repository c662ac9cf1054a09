"""The pages on measured quantities agree with the code, and every link in the repository leads somewhere."""

import math
import re
import statistics
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.comparison import with_speed_up
from analysis.figures import FIGURES
from analysis.ideal import with_ideal_attention
from analysis.load import DERIVED_COLUMNS, RECORD_COLUMNS, config_columns, to_frame
from analysis.quantities import DEFINITIONS
from analysis.summary import summarise
from bench.attention.kernel_facts import KERNEL_FACTS
from bench.cell import analytic
from bench.cost import flops
from bench.median import interval_rank
from bench.record import OutOfMemory, Record, Status
from bench.strategies import STRATEGIES
from bench.strategies.facts import DTYPE_BYTES, activation_bytes, backwards_per_step, forwards_per_step
from tests.analysis.records import make_record, make_timing, make_trace, of_attention
from tests.cells import FOUR_H100, make_cell

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "quantities"
HEADINGS = ["Definition", "Formula", "Source", "Where it stands", "What it does not show"]
PEAK_FLOPS_PER_S = 1e15
MOST_LINES = 50
LOOKED_UP = ("seq_len=512", "sp_degree=4", "cluster.world_size=4")

pages = pytest.mark.parametrize("page", [each.page for each in DEFINITIONS])


def text_of(page):
    return (FOLDER / f"{page}.md").read_text()


def named_in(text):
    """Everything in backticks that is no fenced block."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def formula_of(page):
    """The page's Python, empty where its formula is words."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE))


def a_record():
    """A cell of which every rank, step and part differs from every other."""
    trace = make_trace(
        3,
        step_ms=[110.0, 112.0, 115.0],
        total_ms=[22.0, 30.0, 25.0],
        exposed_ms=[19.0, 11.0, 12.0],
        purpose_total_ms={"attention": [14.0, 15.0, 13.0], "parameters": [8.0, 9.0, 7.0]},
        purpose_exposed_ms={
            "attention": [7.0, 6.0, 9.0],
            "parameters": [2.0, 2.5, 2.2],
            "gradients": [1.0, 1.5, 1.2],
            "data_and_loss": [0.3, 0.5, 0.4],
            "other": [0.1, 0.2, 0.6],
        },
        purpose_exposed_waiting_ms={"attention": [3.0, 2.0, 1.0]},
        compute_ms={
            "attention": [60.0, 66.0, 63.0],
            "packing": [4.0, 5.0, 3.0],
            "optimizer": [10.0, 10.5, 9.0],
            "other": [19.0, 18.0, 17.0],
        },
        idle_ms=[6.0, 7.0, 5.0],
    )
    memory = {
        "peak_allocated_bytes": [20, 40, 30],
        "whole_life_allocated_bytes": [50, 70, 60],
        "peak_reserved_bytes": [80, 81, 79],
        "device_used_bytes": [100, 103, 102],
        "peak_resident_bytes": [500, 650, 600],
        "base_resident_bytes": [300, 510, 410],
    }
    steps_ms = [[100.0 + step * (rank + 1) for step in range(9)] for rank in range(3)]
    cell = make_cell(*LOOKED_UP, machine=FOUR_H100)
    record = make_record(
        config={"cluster.world_size": 3, "sp_degree": 3},
        timing=make_timing(steps_ms),
        trace=trace,
        memory=memory,
        analytic=analytic(cell),
        losses={"loss": [5.5, 5.0, 4.5]},
    )
    return of_attention(record, forward_ms=[[1.0, 2.0, 1.0], [2.5, 1.0, 1.5], [1.0, 1.0, 3.5]],
                        backward_ms=[[3.0, 3.5, 3.0], [4.0, 2.0, 4.0], [1.0, 1.0, 1.0]])  # fmt: skip


@pytest.fixture(scope="module")
def summary():
    frame = to_frame([a_record()], {"h100_80gb": PEAK_FLOPS_PER_S})
    return with_ideal_attention(with_speed_up(summarise(frame)))


def measured_columns(summary):
    """What stands in the summary beside identity and settings."""
    described = {*config_columns(summary), *RECORD_COLUMNS, *DERIVED_COLUMNS} - {"wall_s", "fixed_cost_s"}
    return {column for column in summary.columns if column not in described}


def sections():
    """The record's measured sections, by the name under which a page knows them."""
    hints = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(Record).items()}
    found = {name: kind for name, kinds in hints.items() for kind in kinds if is_dataclass(kind)}
    return found | {"failure.out_of_memory": OutOfMemory}


def record_fields():
    return {f"{name}.{field.name}" for name, section in sections().items() for field in fields(section)}


def measured_fields():
    """All but the words that say how a cell failed."""
    return {name for name in record_fields() if not re.fullmatch(r"failure\.\w+", name)}


def analytic_names():
    words = [("workload=train",), ("workload=attention",)]
    return {f"analytic.{name}" for each in words for name in analytic(make_cell("seq_len=512", *each))}


def test_every_measured_column_and_field_is_defined_once(summary):
    columns = [column for each in DEFINITIONS for column in each.columns]
    assert sorted(columns) == sorted(measured_columns(summary))
    named = [field for each in DEFINITIONS for field in each.fields if field != "failure.found_after_s"]
    assert sorted(named) == sorted(measured_fields())


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: each.page)
def test_a_page_has_its_name_its_meaning_and_all_that_it_defines(definition):
    text = text_of(definition.page)
    assert text.splitlines()[0] == f"# {definition.name}"
    assert definition.meaning in " ".join(text.split())
    assert not {*definition.columns, *definition.fields} - {*named_in(text)}


@pages
def test_a_page_has_all_headings_and_fits_a_screen(page):
    text = text_of(page)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    assert all(part.strip() for part in re.split(r"^## .*$", text, flags=re.MULTILINE))
    assert len(text.splitlines()) <= MOST_LINES


def test_every_page_is_in_the_index_in_its_words():
    assert {path.stem for path in FOLDER.glob("*.md")} == {"README", *(each.page for each in DEFINITIONS)}
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert rows == [index_row(each) for each in DEFINITIONS]


def index_row(definition):
    where = ", ".join(f"`{name}`" for name in definition.columns or definition.fields) or "see the page"
    link = f"[{definition.name}]({definition.page}.md)"
    return f"| {link} | {definition.meaning} | {definition.unit} | {where} |"


@pages
def test_every_module_field_setting_figure_and_name_on_a_page_exists(page, summary):
    named = named_in(text_of(page))
    sources = {name: ROOT / name for name in named if name.endswith(".py") and "/" in name}
    assert not [name for name, path in sources.items() if not path.is_file()]
    figures = [name for name in named if name.startswith("figures/")]
    assert not [name for name in figures if Path(name).stem not in FIGURES]
    settings = make_cell("seq_len=512").flat()
    known = record_fields() | analytic_names() | settings.keys()
    dotted = re.compile(rf"(?:analytic|measure|cluster|data|workload|{'|'.join(sections())})\.\w+")
    of_sections = [name for name in named if dotted.fullmatch(name)]
    assert not [name for name in of_sections if name not in known and name.partition("=")[0] not in known]
    words = {
        *summary.columns, *settings, *STRATEGIES, *KERNEL_FACTS, *DTYPE_BYTES, *Status,
        *(name.rpartition(".")[2] for name in known), *_words_of(sources.values()),
    }  # fmt: skip
    bare = [name for name in named if re.fullmatch(r"[A-Za-z]\w*_\w+", name)]
    assert not [name for name in bare if name not in words]


def _words_of(paths):
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("page", [each.page for each in DEFINITIONS if formula_of(each.page)])
def test_a_formula_gives_what_the_analysis_gives(page, summary):
    record, row = a_record(), summary.iloc[0]
    found = {
        **{name: SimpleNamespace(**value) for name, value in record.items() if isinstance(value, dict)},
        **cell_names(make_cell(*LOOKED_UP, machine=FOUR_H100)),
        "config": record["config"],
        "ranks": record["config"]["cluster.world_size"],
        "step_time_ms": row["step_time_ms"],
        "peak_flops_per_s": PEAK_FLOPS_PER_S,
        "median": statistics.median,
        "comb": math.comb,
    }
    given = {*found}
    exec(formula_of(page), found)  # noqa: S102  a page of this repository
    columns = {*summary.columns} & {*found} - given
    assert columns
    assert {name: found[name] for name in columns} == pytest.approx({name: row[name] for name in columns})


def cell_names(cell):
    """The names that formulas of FLOPs and bytes use."""
    model = cell.model
    return {
        "S": cell.seq_len, "P": cell.sp_degree, "U": cell.ulysses_degree, "R": cell.ring_degree,
        "F": forwards_per_step(cell), "B": backwards_per_step(cell),
        "A": lambda heads: activation_bytes(cell, heads),
        "wide": max(4, DTYPE_BYTES[cell.dtype]) // DTYPE_BYTES[cell.dtype],
        "batch": cell.batch, "shard_len": cell.shard_len, "sequences": cell.sequences_per_step,
        "layers": model.num_layers, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "hidden": model.hidden_size, "vocab": model.vocab_size,
        "intermediate": model.intermediate_size, "checkpointing": cell.checkpointing,
    }  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "words", [(), ("checkpointing=true", "batch=2", "grad_accum=3", "model=qwen3_nano", "seq_len=1k")]
)
def test_the_page_on_payload_says_what_each_strategy_exchanges(name, words):
    row = re.search(rf"^\| `{name}` \| `([^`]*)` \|", text_of("payload"), flags=re.MULTILINE)
    spread = ("seq_len=2k",) if name == "local" else LOOKED_UP
    cell = make_cell(f"strategy={name}", *spread, *words, machine=FOUR_H100)
    assert eval(row[1], {**cell_names(cell), "max": max}) == STRATEGIES[name].exchange_bytes(cell)  # noqa: S307


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_the_page_on_mfu_says_how_flops_are_counted(checkpointing):
    cell = make_cell(*LOOKED_UP, "batch=2", f"checkpointing={checkpointing}", machine=FOUR_H100)
    given = {"ranks": 4, "step_time_ms": 1.0, "peak_flops_per_s": 1.0}
    found = cell_names(cell) | given
    exec(formula_of("mfu"), found)  # noqa: S102  a page of this repository
    assert found["model_flops_causal"] == flops.model_flops(cell, causal=True)
    assert found["model_flops_full"] == flops.model_flops(cell, causal=False)
    assert found["hardware_flops_causal"] == flops.hardware_flops(cell, causal=True)


def test_the_page_on_samples_has_the_interval_s_rank():
    found = {"comb": math.comb}
    exec(formula_of("samples").partition("\n\n\n")[0], found)  # noqa: S102  a page of this repository
    assert [found["interval_rank"](n) for n in range(1, 200)] == [interval_rank(n) for n in range(1, 200)]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(ROOT.rglob("*.md")) if not any(part.startswith(".") for part in path.parts)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_relative_link_leads_to_a_file(path):
    text = re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    )
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    paths = [target.partition("#")[0] for target in targets]
    assert not [target for target in paths if target and not (path.parent / target).exists()]
