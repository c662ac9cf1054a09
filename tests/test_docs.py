"""The sections of docs/quantities agree with the code, and every link leads to a file and heading."""

import ast
import inspect
import itertools
import re
import typing

import pytest

from analysis.read.frame import DERIVED_COLUMNS, RECORD_COLUMNS, config_columns
from analysis.read.metrics import METRIC_LIST, QUANTITIES
from bench.measure.check import Check
from bench.record.record import SECTION_NAMES, Failure, OutOfMemory, Record
from tests.support.quantity_pages import FOLDER, ROOT, anchor_of, named_in, summary_of_one, text_of

LABELS = ["Measured", "Limits", "Stored"]
MAX_LINES = 50
"""Longest section without the rows of its tables: some have a row for every strategy."""
MAX_PAGES = 15
OUR_PAGES = ("*.md", "docs/**/*.md", "results/*.md", "results/reference/**/*.md")

sections = pytest.mark.parametrize("page", [quantity.page for quantity in QUANTITIES])


@pytest.fixture(scope="module")
def summary():
    return summary_of_one()


def measured_columns(summary):
    """Return the columns of the summary that are neither identity nor settings."""
    described = {*config_columns(summary), *RECORD_COLUMNS, *DERIVED_COLUMNS} - {"wall_s", "fixed_cost_s"}
    return {column for column in summary.columns if column not in described}


def record_sections():
    """Return the types of the record's measured sections, by the name that pages use."""
    hints = typing.get_type_hints(Record)
    types = {name: typing.get_args(hints[name])[0] for name in SECTION_NAMES}
    return types | {"failure": Failure, "failure.out_of_memory": OutOfMemory, "checks": Check}


def record_fields():
    return {f"{name}.{field}" for name, kind in record_sections().items() for field in kind.__struct_fields__}


def measured_fields():
    """Return all fields but those that describe how a cell failed."""
    return {name for name in record_fields() if not re.fullmatch(r"failure\.\w+", name)}


def documented_fields(kind):
    """Return the fields of a type that have a docstring."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    return {
        field.target.id
        for field, below in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def test_every_measured_column_is_the_column_of_one_metric(summary):
    assert sorted(metric.name for metric in METRIC_LIST) == sorted(measured_columns(summary))


def test_every_field_has_a_section_or_a_docstring():
    """A type none of whose fields any section names needs docstrings only."""
    named = record_fields() & {name for quantity in QUANTITIES for name in named_in(text_of(quantity.page))}
    without_section = record_sections().keys() - {field.rpartition(".")[0] for field in named}
    documented = {
        f"{name}.{field}" for name in without_section for field in documented_fields(record_sections()[name])
    }
    assert measured_fields() <= named | documented


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.page)
def test_a_section_begins_with_the_meaning_and_names_its_columns(quantity):
    heading, _, text = text_of(quantity.page).partition("\n")
    assert heading == f"## {quantity.name}"
    assert " ".join(text.split()).startswith(quantity.meaning)
    columns = {metric.name for metric in METRIC_LIST if metric.quantity == quantity}
    assert not columns - {*named_in(text)}


@sections
def test_a_section_has_formula_and_labels_and_fits_a_screen(page):
    text = text_of(page)
    assert re.findall(r"^\*\*(\w+):\*\*", text, flags=re.MULTILINE) == LABELS
    formula = text.partition("**Measured:**")[0]
    assert "```" in formula or "\n| " in formula
    assert sum(not line.startswith("|") for line in text.splitlines()) <= MAX_LINES


def test_every_section_is_a_quantity_and_in_the_index():
    pages = [path for path in FOLDER.glob("*.md") if path.name != "README.md"]
    assert len(pages) < MAX_PAGES
    headings = {f"{path.stem}#{anchor}" for path in pages for anchor in anchors_in(path, level=2)}
    assert headings == {quantity.page for quantity in QUANTITIES}
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert sorted(rows) == sorted(map(index_row, QUANTITIES))


def index_row(quantity):
    link = quantity.page.replace("#", ".md#")
    return f"| [{quantity.name}]({link}) | {quantity.meaning} | {quantity.unit} |"


@pytest.fixture(scope="module")
def words():
    """Every word of the code and of conf/."""
    roots = ("bench", "analysis", "conf")
    paths = [path for root in roots for path in (ROOT / root).rglob("*.*") if path.suffix in (".py", ".yaml")]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@sections
def test_every_file_and_name_in_a_section_exists(page, words, summary):
    named = named_in(text_of(page))
    sources = [name for name in named if name.endswith(".py") and "/" in name]
    assert not [name for name in sources if not (ROOT / name).is_file()]
    plain = [name for name in named if re.fullmatch(r"[\w.]+", name)]
    written = {word for name in plain for word in name.split(".") if "_" in word}
    assert not written - words - {*summary.columns}


def prose_of(path):
    """Return a page without its code."""
    unfenced = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", unfenced, flags=re.MULTILINE)


def anchors_in(path, level=None):
    """Return the anchors of a page's headings, of one level or of all."""
    marks = "#" * level if level else "#+"
    headings = re.findall(rf"^{marks} .*$", prose_of(path), flags=re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


@pytest.mark.parametrize(
    "path",
    sorted(path for pattern in OUR_PAGES for path in ROOT.glob(pattern)),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_relative_link_leads_to_a_file_and_heading(path):
    text = re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    )
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors_in(target), link
