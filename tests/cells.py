"""Cells for tests, composed from conf/ exactly as the command line composes them."""

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bench.cell import PlannedCell, run
from bench.environment import Machine
from bench.resolve import CONF, plain, resolve

TWO_CORES = Machine(gpus=(), cores=2, cpu="a test's processor", memory_bytes=2**34)
FOUR_H100 = Machine(gpus=("NVIDIA H100 80GB HBM3",) * 4, cores=64, cpu="x", memory_bytes=2**40)
TINY = ("seq_len=256", "measure.steps=1", "measure.warmup_steps=0", "measure.trace=false")


def make_raw(*overrides):
    """The composed configuration as plain values."""
    return _compose(overrides)


@cache
def _compose(overrides):
    for name in ("new_sweep_dir", "hydra_dir"):
        OmegaConf.register_new_resolver(name, lambda: "unused", replace=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return plain(compose("config", overrides=list(overrides)))


def make_cell(*overrides, machine=TWO_CORES):
    """A resolved cell from command-line words."""
    return resolve(make_raw(*overrides), machine)


def tiny_cell(*overrides):
    """A cell that takes a second: 256 tokens, one timed step, no trace."""
    return make_cell(*TINY, *overrides)


def run_cell(launcher, cell, folder, entry=None):
    """The cell's record, run on real ranks, and its folder."""
    planned = PlannedCell(cell, repeat=0, order=0)
    record = run(planned, launcher, Path(folder), entry=entry)
    return record, Path(folder) / planned.folder_name
