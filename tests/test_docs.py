"""The pages on measured quantities agree with the code, and every link in the repository leads somewhere."""

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
from tests.support.quantity_pages import FOLDER, ROOT, named_in, summary_of_one, text_of

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
    hints = typing.get_type_hints(Record)
    found = {name: typing.get_args(hints[name])[0] for name in SECTION_NAMES}
    return found | {"failure": Failure, "failure.out_of_memory": OutOfMemory, "checks": Check}


def record_fields():
    return {f"{name}.{field}" for name, section in sections().items() for field in section.__struct_fields__}


def measured_fields():
    """All but the words that say how a cell failed."""
    return {name for name in record_fields() if not re.fullmatch(r"failure\.\w+", name)}


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
    columns = [each.name for each in METRIC_LIST]
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
    columns = {each.name for each in METRIC_LIST if each.quantity == quantity}
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


@pytest.fixture(scope="module")
def words():
    """Every word of our code and of its choices."""
    roots = ("bench", "analysis", "conf")
    paths = [path for root in roots for path in (ROOT / root).rglob("*.*") if path.suffix in (".py", ".yaml")]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@pages
def test_every_file_and_name_on_a_page_exists(page, words, summary):
    named = named_in(text_of(page))
    sources = [name for name in named if name.endswith(".py") and "/" in name]
    assert not [name for name in sources if not (ROOT / name).is_file()]
    plain = [name for name in named if re.fullmatch(r"[\w.]+", name)]
    written = {word for name in plain for word in name.split(".") if "_" in word}
    assert not written - words - {*summary.columns}


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
