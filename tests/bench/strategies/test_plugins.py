"""Strategies of installed packages are found by entry points, checked, and refused in one line if broken."""

import re
import sys
import textwrap

import pytest

from bench.config import ConfigError
from bench.request.composition import compose_words
from bench.strategies import STRATEGIES
from bench.strategies.local.facts import LocalFacts
from bench.strategies.ring.facts import RingFacts
from bench.strategies.table import ENTRY_POINTS, StrategyTable
from tests.support.cells import TINY, forget_installed_packages
from tests.support.command import run_command_here

H100 = ("hardware=h100_80gb", "model=qwen3_8b", "seq_len=8k")
GOOD = """
    from bench.strategies.ring.facts import RingFacts

    class Mine(RingFacts):
        name = "NAME"
        options = {"order": ("forwards", "backwards")}
"""


def install(folder, name, facts=GOOD, package="some-package", entry_point=None, *, attention=True):
    """Write a package's code and its metadata with an entry point, as an installer does."""
    code = folder / name
    code.mkdir()
    (code / "facts.py").write_text(textwrap.dedent(facts).replace("NAME", name))
    if attention:
        (code / "attention.py").write_text(
            "from bench.strategies.ring.attention import STRATEGY as STRATEGY\n"
        )
    metadata = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\n{entry_point or name} = {name}.facts:Mine\n"
    )


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a package for one test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield lambda *arguments, **keywords: install(tmp_path, *arguments, **keywords)
    for module in set(sys.modules) - before:
        del sys.modules[module]


@pytest.fixture
def table():
    """A table of two built-in strategies and the installed plug-ins."""
    return StrategyTable((LocalFacts(), RingFacts()))


def test_plugins_follow_built_in_strategies_in_name_order(installed, table):
    installed("zz_mine", package="a-package")
    installed("aa_mine", package="z-package")
    assert [*table] == ["local", "ring", "aa_mine", "zz_mine"]
    assert table["ring"].name == "ring"
    assert not {"aa_mine.facts", "zz_mine.facts"} & sys.modules.keys()
    assert len(table) == len(table.usable()) == 4
    assert "zz_mine" in table
    assert table["zz_mine"].name == "zz_mine"
    assert table.packages("zz_mine") == {"a-package": "1.2"}
    assert table.packages("ring") == {}


STYLED = f"{GOOD}        from bench import PlotStyle; style = PlotStyle('#000000', 'o', ':')"
BROKEN = {
    "an error of its own": ('raise RuntimeError("two\\nlines")', "cannot be loaded: RuntimeError: two ("),
    "no StrategyFacts": ("class Mine:\n    name = 'NAME'", "is not a subclass of bench.StrategyFacts"),
    "another name": (
        GOOD.replace("NAME", "other"),
        "has name = 'other', but its entry point is named 'broken'",
    ),
    "a class from elsewhere": (
        f"{GOOD}\n    Mine.__module__ = 'elsewhere'",
        "is defined in the module elsewhere",
    ),
    "a layout that is no tuple": (f'{GOOD}        layouts = ("zigzag")', "has layouts = 'zigzag'"),
    "no attention module": (GOOD, "needs the module broken.attention"),
    "an unknown layout": (f'{GOOD}        layouts = ("spiral",)', "contiguous, zigzag, striped"),
    "a style of another type": (f'{GOOD}        style = ("#000000", "o")', "it must be a bench.PlotStyle"),
    "a colour by name": (STYLED.replace("'#000000'", "'red'"), "color='red'; it must be six hexadecimal"),
    "a marker without an inside": (STYLED.replace("'o'", "'x'"), "marker='x'; it must be one of o, v, ^"),
    "a marker in a list": (
        STYLED.replace("'o'", "[5, 1, 0]"),
        "marker=[5, 1, 0]; it must be one",
    ),
    "a star without corners": (STYLED.replace("'o'", "(0, 1, 0)"), "marker=(0, 1, 0); it must be one of"),
    "an unknown line": (STYLED.replace("':'", "'solid'"), "line='solid'; it must be one of -, --, -., :"),
    "an option without a choice": (f'{GOOD}        options = {{"order": ()}}', "must be a tuple"),
    "an option called name": (f'{GOOD}        options = {{"name": ("x",)}}', "no key may be `name`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_refused_in_one_line_and_spares_others(installed, table, case):
    facts, fault = BROKEN[case]
    installed("broken", facts, attention=case != "no attention module")
    with pytest.raises(ConfigError) as refused:
        table["broken"]
    line = str(refused.value)
    assert fault in line
    assert "\n" not in line
    assert line.startswith("strategy=broken: broken.facts:Mine of the package some-package 1.2 ")
    assert line.endswith("pip uninstall some-package")
    assert [facts.name for facts in table.usable()] == ["local", "ring"]


def test_name_shared_with_another_strategy_is_refused(installed, table):
    installed("one", package="one-package", entry_point="mine")
    installed("two", package="two-package", entry_point="mine")
    with pytest.raises(ConfigError, match=r"one-package and two-package .* pip uninstall two-package"):
        table["mine"]
    installed("three", entry_point="ring")
    other_table = StrategyTable((LocalFacts(), RingFacts()))
    with pytest.raises(ConfigError, match="ulysses-ring-bench and some-package both have a strategy"):
        other_table["ring"]
    assert other_table["local"].name == "local"


@pytest.fixture
def typed(tmp_path, monkeypatch, installed):
    """A function that runs the command line in an empty folder with the packages of this test."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    forget_installed_packages(monkeypatch)
    return lambda *words: run_command_here(folder, *words)


def test_command_line_works_with_a_broken_plugin_installed(tmp_path, typed, installed):
    installed("broken", "import no_such_module")
    installed("my_ring", package="my-package")
    shown = typed("--help-all")
    assert (shown.returncode, shown.stderr) == (0, "")
    names = re.findall(r"^  [*m ] strategy=(\w+)", shown.stdout, flags=re.MULTILINE)
    assert names == sorted([*STRATEGIES.built_in, "broken", "my_ring"])
    assert "strategy=my_ring: " in shown.stdout
    job = typed("--cfg", "job", "strategy=my_ring", "strategy.order=backwards")
    assert job.returncode == 0
    assert "strategy:\n  name: my_ring\n  order: backwards\n" in job.stdout
    refused = typed("-m", "strategy=local,broken", *TINY)
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "strategy=broken: broken.facts:Mine of the package some-package 1.2 cannot"
    )
    assert len(refused.stderr.splitlines()) == 1
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_plugin_options_are_read_again_for_every_composition(installed, monkeypatch):
    forget_installed_packages(monkeypatch)
    installed("my_ring")
    assert compose_words("strategy=my_ring")["strategy"] == {"name": "my_ring", "order": "forwards"}
    monkeypatch.setattr(sys.modules["my_ring.facts"].Mine, "options", {"order": ("backwards", "forwards")})
    assert compose_words("strategy=my_ring")["strategy"] == {"name": "my_ring", "order": "backwards"}


FAILS = "of the package some-package 1.2 fails when its facts are read: TypeError"
REFUSED = {
    "an unknown strategy": ("", ("strategy=my_rin",), "did you mean strategy=my_ring?"),
    "another's choice": ("", ("strategy=ring", "strategy.order=forwards"), "only strategy=my_ring has this"),
    "an unknown choice": ("", ("strategy.order=up",), "must be one of backwards, forwards"),
    "an unknown key": ("", ("strategy.ordre=up",), "did you mean strategy.order?"),
    "a layout that it lacks": ('layouts = ("zigzag",)', ("layout=striped",), "choose layout=zigzag"),
    "failing refusals": ("refusals = 3", ("-m", *TINY), FAILS),
    "failing refusals of autocast": ("autocast_refusals = 3", ("-m", *TINY), FAILS),
    "failing bytes": ("communication_bytes = 3", ("-m", *TINY), FAILS),
    "a failing degree": ("ulysses_degree = 3", ("-m", *TINY), FAILS),
    "a failing memory formula": ("saved_bytes_per_token = 3", ("-m", *TINY), FAILS),
    "half a byte": (
        "communication_bytes = lambda self, cell: cell.seq_len / 2",
        TINY,
        "communication_bytes must be a whole number, not 128.0",
    ),
    "no schedule to predict from": (
        "schedule = lambda self, cell: None; communication_bytes = lambda self, cell: 0",
        ("mode=predict", *H100),
        "mode=predict needs a schedule, which strategy=my_ring lacks; define StrategyFacts.schedule",
    ),
}
"""Lines added to the facts, words of the command (`strategy=my_ring` is added), and part of the refusal."""


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_request_of_a_plugin_is_refused_in_one_line(typed, installed, case):
    facts, words, reason = REFUSED[case]
    installed("my_ring", f"{GOOD}        {facts}")
    own = () if words[0].startswith("strategy=") else ("strategy=my_ring",)
    refused = typed(*words, *own)
    assert refused.returncode == 2
    assert reason in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
