"""The pages on measured quantities agree with the code, and every link in the repository leads somewhere."""

import ast
import inspect
import itertools
import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from analysis.figures.figures import FIGURES
from analysis.frame.load import DERIVED_COLUMNS, RECORD_COLUMNS, config_columns
from analysis.metrics.definitions import DEFINITIONS, QUANTITIES
from bench.attention.kernel_facts import KERNEL_FACTS
from bench.cell.outcome import analytic
from bench.config import DTYPE_BYTES
from bench.passes import PASSES
from bench.record import Check, Failure, OutOfMemory, Status
from bench.strategies import STRATEGIES
from tests.cells import make_cell
from tests.quantity_pages import FOLDER, ROOT, named_in, summary_of_one, text_of

HEADINGS = ["Definition", "Formula", "Source", "Where it stands", "What it does not show"]
MOST_LINES = 50
"""Of a page without the rows of its tables: some have one for every strategy."""
OUR_PAGES = ("*.md", "docs/**/*.md", "results/*.md", "results/reference/**/*.md")

pages = pytest.mark.parametrize("page", [each.page for each in QUANTITIES])


@pytest.fixture(scope="module")
def summary():
    return summary_of_one()


def measured_columns(summary):
    """What stands in the summary beside identity and settings."""
    described = {*config_columns(summary), *RECORD_COLUMNS, *DERIVED_COLUMNS} - {"wall_s", "fixed_cost_s"}
    return {column for column in summary.columns if column not in described}


def sections():
    """The record's measured sections, by the name under which a page knows them."""
    merged = {name: typing.get_type_hints(type(each).merge)["return"] for name, each in PASSES.items()}
    found = {name: kind for name, kind in merged.items() if is_dataclass(kind)}
    return found | {"failure": Failure, "failure.out_of_memory": OutOfMemory, "checks": Check}


def record_fields():
    return {f"{name}.{field.name}" for name, section in sections().items() for field in fields(section)}


def measured_fields():
    """All but the words that say how a cell failed."""
    return {name for name in record_fields() if not re.fullmatch(r"failure\.\w+", name)}


def analytic_names():
    words = [("workload=train",), ("workload=attention",)]
    return {f"analytic.{name}" for each in words for name in analytic(make_cell("seq_len=512", *each))}


def meanings(section):
    """Of a section's fields those with a meaning under them."""
    (kind,) = ast.parse(inspect.getsource(section)).body
    return {
        field.target.id
        for field, below in itertools.pairwise(kind.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def test_every_measured_column_is_defined_once_and_every_field_on_a_page_or_under_it(summary):
    """A section of which no report shows anything needs no page; of another every field has one."""
    columns = [each.column for each in DEFINITIONS]
    assert sorted(columns) == sorted(measured_columns(summary))
    named = record_fields() & {name for each in QUANTITIES for name in named_in(text_of(each.page))}
    without_page = sections().keys() - {field.rpartition(".")[0] for field in named}
    explained = {f"{name}.{each}" for name in without_page for each in meanings(sections()[name])}
    assert measured_fields() <= named | explained


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda each: each.page)
def test_a_page_has_its_name_its_meaning_and_all_that_it_defines(quantity):
    text = text_of(quantity.page)
    assert text.splitlines()[0] == f"# {quantity.name}"
    assert quantity.meaning in " ".join(text.split())
    columns = {each.column for each in DEFINITIONS if each.quantity == quantity}
    assert not columns - {*named_in(text)}


@pages
def test_a_page_has_all_headings_and_fits_a_screen(page):
    text = text_of(page)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    assert all(part.strip() for part in re.split(r"^## .*$", text, flags=re.MULTILINE))
    assert sum(not line.startswith("|") for line in text.splitlines()) <= MOST_LINES


def test_every_page_is_in_the_index_in_its_words():
    assert {path.stem for path in FOLDER.glob("*.md")} == {"README", *(each.page for each in QUANTITIES)}
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert sorted(rows) == sorted(map(index_row, QUANTITIES))


def index_row(quantity):
    return f"| [{quantity.name}]({quantity.page}.md) | {quantity.meaning} | {quantity.unit} |"


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


@pytest.mark.parametrize(
    "path",
    sorted(path for pattern in OUR_PAGES for path in ROOT.glob(pattern)),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_relative_link_leads_to_a_file(path):
    text = re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    )
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    paths = [target.partition("#")[0] for target in targets]
    assert not [target for target in paths if target and not (path.parent / target).exists()]
