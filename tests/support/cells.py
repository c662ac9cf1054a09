"""Make and run cells for tests, composed from conf/ exactly as the command line composes them."""

import itertools
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from bench.common.environment import Machine, installed_version
from bench.measure import PASSES
from bench.plan.planned import planned_cell
from bench.request.choices import default_strategies, groups, read_option
from bench.request.composition import compose_words
from bench.request.resolve import resolve
from bench.run.cell.run import SharedSections, run
from bench.strategies import STRATEGIES
from bench.strategies.options import Flag, WholeNumber, flag_text

TWO_CORES = Machine(gpus=(), cores=2, cpu="a test's processor", memory_bytes=2**34)
FOUR_H100 = Machine(gpus=("NVIDIA H100 80GB HBM3",) * 4, cores=64, cpu="x", memory_bytes=2**40)
ONE_H200 = Machine(gpus=("NVIDIA H200",), cores=16, cpu="x", memory_bytes=2**37)
TINY = (
    "seq_len=256", "measure.steps=1", "measure.warmup_steps=0", "measure.trace=false", "measure.repeats=1",
    "measure.reference_budget_s=0",
)  # fmt: skip


SHARE_EVERY_HEAD = ("deepspeed_fpdt", "ringmaster_ulysses", "yunchang_ulysses")
"""Strategies that repeat no KV head, so that a cell needs at least one KV head per rank."""

_composed_once = cache(compose_words)


@cache
def make_raw(*words):
    """Return the request that the command line composes of these words.

    Hydra takes long, so it composes the files only once for all requests with equal choices, and values are
    set here. tests/bench/request/test_composition.py compares the result with Hydra's.
    """
    choices = tuple(word for word in words if word.partition("=")[0] in groups())
    raw = OmegaConf.create(_composed_once(*choices))
    values = [word for word in words if word not in choices]
    for override in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(raw, override.key_or_group, override.value())
    return OmegaConf.to_container(raw, resolve=True)


def make_cell(*overrides, machine=TWO_CORES):
    """Return a resolved cell from command-line words."""
    return resolve(make_raw(*overrides), machine)


def raw_with(values):
    """Return the default request with these values, by dotted key, without asking Hydra."""
    raw = deepcopy(make_raw())
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (raw[section] if section else raw)[name] = value
    return raw


def raws_of(strategies, lengths, **values):
    """Return a request for every strategy (by default those of a sweep) and length; `a__b` means `a.b`."""
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return [
        raw_with(
            {"strategy": read_option("strategy", name), "seq_len": length, "sweep_dir": "out", **changed}
        )
        for name in strategies or default_strategies()
        for length in lengths
    ]


def with_strategy(raw, name):
    """Return the request with this strategy and the options in its file."""
    return {**raw, "strategy": read_option("strategy", name)}


def tiny_cell(*overrides):
    """Return a cell that takes a second, with 256 tokens, one timed step and no trace."""
    return make_cell(*TINY, *overrides)


@cache
def _sections_so_far():
    return SharedSections()


def variants(facts, numbers=1):
    """Return every layout of a strategy with all its options; a number takes its first `numbers` values."""
    choices = [[(key, text) for text in texts_of(option, numbers)] for key, option in facts.options.items()]
    return [
        (layout, options)
        for layout, options in itertools.product(facts.layouts, itertools.product(*choices))
        if layout in facts.layouts_with(dict(options))
    ]


def words_for(strategy, options=()):
    """Return the words with which a strategy with these options runs on up to four CPU ranks."""
    needs_all = strategy in SHARE_EVERY_HEAD or ("rotation", "distflash") in options
    heads = ("model=qwen3_nano", "model.num_kv_heads=4") if needs_all else ()
    return *heads, *words_of_choices(options)


def words_of_choices(options):
    """Return the words that some rotations need on CPU ranks: another kernel, or no autocast."""
    words = {"p2p": ("kernel=math", "dtype=fp32"), "distflash": ("dtype=fp32",)}
    return words.get(dict(options).get("rotation"), ())


def texts_of(option, numbers):
    """Return values of an option as a cell has them."""
    if isinstance(option, WholeNumber):
        return [str(option.least + more) for more in range(numbers)]
    return [*map(flag_text, (True, False))] if isinstance(option, Flag) else option


CHECKS = ("parity", "objective", "full_length")
"""Passes that compare with float64; they take half the time of a small cell."""


NEED_ALL_RANKS = tuple(name for name, facts in PASSES.items() if facts.needs_all_ranks)
"""Passes that a replay skips."""


class SkippedPasses(SharedSections):
    """Sections that skip some passes, as if an equal cell had run them and had no sections."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def sections_for(self, cell):
        return dict.fromkeys(self.names)


def run_cell(launcher, cell, folder, entry=None, *, without=()):
    """Run a cell on real ranks and return its record and folder.

    Equal cells share sections, as in a sweep. `without` are passes that the test does not need.
    """
    planned = planned_cell(cell, TWO_CORES)
    shared = SkippedPasses(without) if without or entry is not None else _sections_so_far()
    record = run(planned, launcher, Path(folder), entry=entry, shared=shared)
    return record, Path(folder) / planned.folder_name


def counted_and_expected_bytes(record):
    """Return the counted bytes by purpose and rank, and those of the formula, without zeros."""
    ranks = record.config["cluster.world_size"]
    counted = record.engagement.sent_bytes
    computed = {purpose: [size] * ranks for purpose, size in record.analytic.payload_bytes.items()}
    return tuple(
        {name: sizes for name, sizes in by_purpose.items() if any(sizes)}
        for by_purpose in (counted, computed)
    )


INSTALLED = [
    name for name, facts in STRATEGIES.items() if facts.package is None or installed_version(facts.package)
]
"""Strategies that can run here; the packages of some are optional and often not installed."""


def forget_installed_packages(monkeypatch):
    """Let this process look again for packages that have strategies; undone at the end of the test."""
    len(STRATEGIES)  # fills the caches that monkeypatch restores
    monkeypatch.delitem(vars(STRATEGIES), "_plugins")
    monkeypatch.setattr(STRATEGIES, "_loaded", {**STRATEGIES._loaded})
