"""Cells for tests, composed from conf/ exactly as the command line composes them."""

import itertools
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from bench.common.environment import Machine, installed
from bench.measure import PASSES
from bench.plan.planned import planned_cell
from bench.request.choices import default_strategies, groups, read_option
from bench.request.composition import composed
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
"""Strategies that repeat no KV head: there have to be as many as ranks."""

_of_choices = cache(composed)


@cache
def make_raw(*words):
    """What the command line composes of these words.

    Hydra composes the files once for all requests that choose the same, as that takes long; values are put in
    here. tests/bench/request/test_composition.py holds this against Hydra.
    """
    choices = tuple(word for word in words if word.partition("=")[0] in groups())
    raw = OmegaConf.create(_of_choices(*choices))
    values = [word for word in words if word not in choices]
    for each in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(raw, each.key_or_group, each.value())
    return OmegaConf.to_container(raw, resolve=True)


def make_cell(*overrides, machine=TWO_CORES):
    """A resolved cell from command-line words."""
    return resolve(make_raw(*overrides), machine)


def raw_with(values):
    """The default request with these values by their dotted keys; composed once, as that takes long."""
    raw = deepcopy(make_raw())
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (raw[section] if section else raw)[name] = value
    return raw


def raws_of(strategies, lengths, **values):
    """A request for each strategy, or each that a sweep compares by default, and length; `a__b` is `a.b`."""
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return [
        raw_with(
            {"strategy": read_option("strategy", name), "seq_len": length, "sweep_dir": "out", **changed}
        )
        for name in strategies or default_strategies()
        for length in lengths
    ]


def with_strategy(raw, name):
    """The request with this strategy, and each of its own choices as its file has it."""
    return {**raw, "strategy": read_option("strategy", name)}


def tiny_cell(*overrides):
    """A cell that takes a second: 256 tokens, one timed step, no trace."""
    return make_cell(*TINY, *overrides)


@cache
def _found_so_far():
    return SharedSections()


def variants(facts, numbers=1):
    """Every layout of a strategy with every choice that is its own, and of a number the first few."""
    choices = [[(key, text) for text in texts_of(option, numbers)] for key, option in facts.options.items()]
    return [
        (layout, options)
        for layout, options in itertools.product(facts.layouts, itertools.product(*choices))
        if layout in facts.layouts_with(dict(options))
    ]


def words_for(strategy, options=()):
    """What a strategy with these choices has to be told to run on up to four CPU ranks."""
    needs_all = strategy in SHARE_EVERY_HEAD or ("rotation", "distflash") in options
    heads = ("model=qwen3_nano", "model.num_kv_heads=4") if needs_all else ()
    return *heads, *words_of_choices(options)


def words_of_choices(options):
    """On CPU ranks a ring that passes keys from rank to rank has a kernel of its own, not under autocast."""
    words = {"p2p": ("kernel=math", "dtype=fp32"), "distflash": ("dtype=fp32",)}
    return words.get(dict(options).get("rotation"), ())


def texts_of(option, numbers):
    """What a cell may hold of it."""
    if isinstance(option, WholeNumber):
        return [str(option.least + more) for more in range(numbers)]
    return [*map(flag_text, (True, False))] if isinstance(option, Flag) else option


CHECKS = ("parity", "objective", "full_length")
"""Passes that compare with float64; of a small cell they take half the time."""


NEED_ALL_RANKS = tuple(name for name, facts in PASSES.items() if facts.needs_all_ranks)
"""Passes that a replay leaves out."""


class LeftOut(SharedSections):
    """Says of some passes that they need not run, as if an equal cell had found nothing by them."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def of(self, cell):
        return dict.fromkeys(self.names)


def run_cell(launcher, cell, folder, entry=None, *, without=()):
    """The cell's record and folder, from real ranks; what equal cells share is found once, as in a sweep.

    `without` are passes that a test does not look at.
    """
    planned = planned_cell(cell, TWO_CORES)
    shared = LeftOut(without) if without or entry is not None else _found_so_far()
    record = run(planned, launcher, Path(folder), entry=entry, shared=shared)
    return record, Path(folder) / planned.folder_name


def counted_and_computed(record):
    """By purpose and rank the bytes that collectives carried, and what the formula says; without zeros."""
    ranks = record.config["cluster.world_size"]
    counted = record.engagement.sent_bytes
    computed = {purpose: [size] * ranks for purpose, size in record.analytic.payload_bytes.items()}
    return tuple({name: sizes for name, sizes in each.items() if any(sizes)} for each in (counted, computed))


INSTALLED = [name for name, facts in STRATEGIES.items() if facts.package is None or installed(facts.package)]
"""Strategies that can run here: some are optional, and their packages seldom there."""


def see_what_is_installed_now(monkeypatch):
    """A process reads once which packages have strategies, and their facts; undone, it knows what it knew."""
    len(STRATEGIES)  # reads it, for there to be something to undo
    monkeypatch.delitem(vars(STRATEGIES), "_plugins")
    monkeypatch.setattr(STRATEGIES, "_loaded", {**STRATEGIES._loaded})
