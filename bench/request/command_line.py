"""Checks of the command line before Hydra composes it, and its translation into Hydra's grammar."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from bench.common.command import sweep_command
from bench.common.labels import value_label
from bench.config import ConfigError, ExitCode
from bench.request import values
from bench.request.choices import check_option, groups, options
from bench.request.resolve import AGENT_KEYS, SWEEP_KEYS, all_keys
from bench.request.values import MAX_CELLS, refuse_too_many

SWEEP_OPTIONS = ("-m", "--multirun")
PLAN_OPTION, PLAN_WORD = "--plan", "plan=true"
"""The option that prints the plan, and the word that replaces it for Hydra."""
SHOW_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "--help": (),
    "-h": (),
    "--help-all": (),
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
}
"""Options that print something and run nothing, each with the values that it takes.

Hydra's other options are refused, because they would read another configuration or a pickle.
"""


LAUNCHERS: Mapping[str, tuple[str, str, str]] = {
    "torchrun": (r"torchrun|torch\.distributed|accelerate|deepspeed\.launcher", "WORLD_SIZE", "RANK"),
    "srun": ("slurmstepd", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("mpirun|mpiexec|orted|prted", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("mpirun|mpiexec|hydra_pmi_proxy", "PMI_SIZE", "PMI_RANK"),
}
"""Launchers: pattern of the parent's command line, and the variables of the number of processes and the rank.

Variables alone prove nothing, as they may be left over in a shell.
"""
TEXT_KEYS = ("cluster.hosts", "cluster.start")
"""Keys whose whole value is one text, with commas and braces."""
FIRST_PROCESS_S = 10.0
"""Seconds that other processes of a launcher leave the first one to print why it ends."""


def refuse_several_processes(environment: Mapping[str, str], parent: str) -> None:
    """Raise ConfigError if a launcher started this process as one of several.

    Each of them would run the whole sweep. Only the first says so; the others exit with the same code.
    `parent` is the command line of the parent process.
    """
    for launcher, (pattern, count, rank) in LAUNCHERS.items():
        if environment.get(count, "1") == "1" or not re.search(pattern, parent):
            continue
        if environment.get(rank, "0") != "0":
            time.sleep(FIRST_PROCESS_S)  # launchers end all processes when one of them has failed
            sys.exit(ExitCode.INVALID_REQUEST)
        raise ConfigError(
            f"{launcher} started {environment[count]} processes, and each would run the whole sweep; run"
            f" `python run_sweep.py ...` without {launcher}: it starts the ranks itself"
        )


def parent_command() -> str:
    """Return the command line of the parent process; empty if this system does not show it."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace")


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line in Hydra's grammar: options first, and `++env.NAME` for `env.NAME`.

    Raises:
        ConfigError: An option or a word is not allowed, or a word chooses what its group does not have.
        OverrideParseException: Hydra cannot parse a word.
    """
    for word in arguments:
        if not word.isprintable():
            raise ConfigError(
                f"{ascii(word)[1:-1]}: has characters that cannot be printed on one line; leave them out"
            )
    flags, words = _split_options(arguments)
    words = [quote_text(word) for word in words]
    is_sweep = flags[:1] == ["-m"]
    if is_sweep and len(flags) > 1:
        raise ConfigError(f"{' '.join(flags)}: {flags[1]} shows settings and runs nothing; leave out -m")
    # An experiment is a sweep without -m: its file in conf/ sets Hydra's mode.
    has_experiment = any(word.startswith("experiment=") and word != "experiment=none" for word in words)
    overrides = {word: parse_word(word) for word in words}
    for word, override in overrides.items():
        _refuse_other_than_values(override, word)
        _refuse_sweep(override, word, is_sweep=is_sweep or has_experiment)
        if override.key_or_group in groups():
            for value in _values(override):
                check_option(override.key_or_group, value)
    refuse_too_many([len(_values(override)) for override in overrides.values()])
    return [*flags, *(f"++{word}" if word.startswith("env.") else word for word in words)]


def quote_text(word: str) -> str:
    """Return a word, with its value in quotes if it sets one of TEXT_KEYS, as Hydra splits at commas."""
    key, _, value = word.partition("=")
    if key not in TEXT_KEYS or re.fullmatch(r"""null||\[.*|"[^"]*"|'[^']*'""", value):
        return word
    escaped = re.sub(r'(\\*)("|$)', lambda end: 2 * end[1] + (end[2] and r"\""), value)
    return f'{key}="{escaped}"'


def parse_word(word: str) -> Override:
    """Parse a word of the command line by Hydra's grammar.

    Raises:
        OverrideParseException: The word breaks Hydra's grammar.
        ConfigError: A number is too long, or brackets are nested too deeply, for Python.
    """
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else "too long"
        raise ConfigError(
            f"{value_label(word)}: cannot be read, it is {problem}; write a shorter value"
        ) from None


def _split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's options (`-m`, or one option with its value) and the words that are no options."""
    words: list[str] = []
    show_option: list[str] = []
    is_sweep = False
    rest = iter(arguments)
    for word in rest:
        if word in SWEEP_OPTIONS:
            is_sweep = True
        elif word == PLAN_OPTION:
            words.append(PLAN_WORD)
        elif word.startswith("-"):
            show_option = show_option or _read_option(word, rest)
        else:
            words.append(word)
    return [*(["-m"] if is_sweep else []), *show_option], words


def _read_option(word: str, rest: Iterator[str]) -> list[str]:
    """Return one of SHOW_OPTIONS with its value, which may be the next word; raise ConfigError for others."""
    name, has_value, value = word.partition("=")
    if name in SHOW_OPTIONS:
        allowed = SHOW_OPTIONS[name]
        chosen = value if has_value else next(rest, None)
        return [name, values.choice(name, chosen, allowed)] if allowed else [name]
    if name == PLAN_OPTION:
        raise ConfigError(f"{word}: takes no value; write {PLAN_OPTION}")
    key = name.lstrip("-").replace("-", "_")
    if key in (*all_keys(), *groups()):
        raise ConfigError(f"{word}: keys are written without dashes; write {key}={value or '...'}")
    if (answer := values.not_offered(key)) is not None:
        raise ConfigError(f"{word}: {answer}")
    near = values.nearest(name, [*SHOW_OPTIONS, *SWEEP_OPTIONS, PLAN_OPTION])
    if near is None and (meant := values.nearest(key, [*all_keys(), *groups()])):
        near = f"{meant}={value or '...'}"
    hint = "write keys without dashes, as in seq_len=8k; --help lists the common keys"
    if near:
        hint = f"did you mean {near}?"
    raise ConfigError(f"{word}: no such option; {hint}")


def _refuse_other_than_values(override: Override, word: str) -> None:
    """Raise ConfigError for a word that would add, delete or move a key; words only set values."""
    key = override.key_or_group
    plain = f"{key}={word.partition('=')[2] or '...'}"
    if not key:
        raise ConfigError(f"{word}: is not of the form key=value; write for example seq_len=8k")
    if key.replace("/", ".").split(".")[0] == "hydra":
        raise ConfigError(
            f"{word}: Hydra's settings cannot be changed; use sweep_dir=... for the folder, -m for a sweep"
        )
    is_added = override.is_add() or override.is_force_add()
    exists = key in (*(known for known in all_keys() if "." not in known), *groups())
    if override.is_delete() or override.package is not None or (is_added and exists):
        raise ConfigError(
            f"{word}: words can neither add, delete nor move a key; write {plain}, or leave it out"
        )


def _refuse_sweep(override: Override, word: str, *, is_sweep: bool) -> None:
    """Raise ConfigError for several values without a sweep or of one of SWEEP_KEYS, and for no values."""
    key = override.key_or_group
    if not override.is_sweep_override():
        return
    if not is_sweep:
        raise ConfigError(f"{word}: several values need -m, as in: {sweep_command()} -m {word}")
    if key in SWEEP_KEYS or key in {f"cluster.{name}" for name in AGENT_KEYS}:
        raise ConfigError(f"{word}: one value applies to the whole sweep; write only one")
    if not override.is_discrete_sweep() or not _values(override):
        raise ConfigError(f"{word}: has no values; write them with commas, as in seq_len=8k,64k")


def _values(override: Override) -> list[Any]:
    """Return at most the first MAX_CELLS + 1 values of a word, since a range may be too long for memory."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options(override.key_or_group))
    if not override.is_sweep_override():
        return [value]
    try:
        return list(islice(override.sweep_iterator(), MAX_CELLS + 1))
    except (ValueError, HydraException):
        return []
