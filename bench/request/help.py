"""The text of `--help` and `--help-all`, made of the defaults and comments in conf/."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common.command import sweep_command
from bench.common.labels import value_label
from bench.config import ConfigError
from bench.request.choices import CONF, default_strategies, groups, options
from bench.request.resolve import all_keys
from bench.strategies import STRATEGIES
from bench.strategies.options import legal_values, yaml_default

MAX_LINE, MAX_LEFT_COLUMN = 110, 40
"""Largest number of characters in a line, and in the left of two columns."""
HEAD = "Measures Ulysses and Ring Attention, and compares them with attention without sequence parallelism."
EXAMPLES: Sequence[tuple[str, str]] = (
    (
        "{program} --plan -m seq_len=8k,64k,96k",
        "print the cells of the sweep, their time and their memory; run nothing",
    ),
    ("{program} -m seq_len=8k,64k,96k", "run the sweep: {strategies}, unless strategy= names others"),
    ("{program} strategy=ulysses seq_len=32k", "run one cell"),
)
OPTIONS: Sequence[tuple[str, str]] = (
    ("-m, --multirun", "sweep: run all combinations of values, as in seq_len=8k,64k"),
    ("--plan", "print the cells, their time and memory; run and write nothing"),
    ("-c, --cfg job|hydra|all", "print the composed configuration of Hydra"),
    ("-h, --help", "print the common keys"),
    ("--help-all", "print every key and every option of every choice"),
)
COMMON_KEYS = (
    *("strategy", "model", "engine", "trainer", "workload", "data", "hardware", "cluster", "experiment"),
    *("mode", "seq_len", "batch", "grad_accum", "dtype", "layout", "kernel"),
    *("sp_degree", "ulysses_degree", "dp_replicate", "dp_shard"),
    *("checkpointing", "loss", "tiled_mlp", "offload.activations", "offload.optimizer"),
    *("seed", "env", "resume", "sweep_dir", "model.path", "data.path", "data.packing"),
    *("cluster.world_size", "cluster.memory_limit_gib", "cluster.nodes"),
    *("measure.steps", "measure.warmup_steps", "measure.budget_s", "measure.repeats", "measure.timeout_s"),
)
"""Keys that `--help` lists."""
LINE = re.compile(r"^(?P<indent>[ -]*)(?P<key>\w+):\s*(?P<value>[^#]*?)\s*(?:#\s*(?P<comment>.*))?$")
"""A line of YAML: indentation, key, value and comment."""


def help_text(*, whole: bool = False) -> str:
    """Return the help in lines of at most MAX_LINE characters: COMMON_KEYS, or with `whole` all keys."""
    lines, program, strategies = key_lines(), sweep_command(), ", ".join(default_strategies())
    page = [HEAD, ""]
    for command, meaning in EXAMPLES:
        page += [f"  {command.format(program=program)}", f"      {meaning.format(strategies=strategies)}"]
    page += ["", "Choices and keys, each with its default (key=value). Which to choose when: docs/choices.md"]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in lines):
        keys = [key for key in lines if key.rpartition(".")[0] == section and (whole or key in COMMON_KEYS)]
        rows = [_key_row(key, *lines[key], names=not whole) for key in keys]
        page += ["", *_two_columns(rows)] if rows else []
    if whole:
        page += ["", "Options of each choice: * marks the default, m what a sweep (-m) runs by default"]
        page += [line for group in groups() for line in _option_table(group, lines[group][0])]
        page += ["", "An installed package can add strategies: docs/your_strategy.md"]
    page += ["", "Options of the command line", *_two_columns(OPTIONS), "", "Every command: docs/commands.md"]
    return "\n".join(page)


def key_lines() -> dict[str, tuple[str, str]]:
    """Return the default and the comment of each key, as its line in conf/ states them.

    A key that several options of a choice have is taken from the choice's default option, if that has it.
    """
    lines = {key: (value, comment) for key, value, comment in _commented_lines(CONF / "config.yaml")}
    for group in groups():
        default = CONF / group / f"{lines[group][0]}.yaml"
        for file in sorted((CONF / group).glob("*.yaml"), key=lambda file: (file != default, file)):
            for key, value, comment in _commented_lines(file, group):
                lines.setdefault(key, (value, comment))
    for facts in STRATEGIES.usable():
        for name, option in facts.options.items():
            comment = f"strategy={facts.name}: {legal_values(option)}"
            lines.setdefault(f"strategy.{name}", (value_label(yaml_default(option)), comment))
    known = all_keys()
    return {key: line for key, line in lines.items() if key in known}


def _commented_lines(file: Path, group: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, default and comment of each line with a comment; of a choice's file only top-level keys."""
    section = group
    for match in filter(None, map(LINE.match, file.read_text().splitlines())):
        indent, key, value, comment = match["indent"], match["key"], match["value"], match["comment"]
        section = section if indent else group
        if not value:
            section = "" if key == "defaults" else key
        elif comment and not (indent and group):
            yield f"{section}.{key}".lstrip("."), value, comment


def _key_row(key: str, default: str, comment: str, *, names: bool) -> tuple[str, str]:
    """Return the columns of a key: `key=default`, and its comment.

    A default that depends on the model or on other keys is left out. With `names`, the comment of a choice
    ends with the names of its options.
    """
    is_open = default.startswith("${") or key.startswith("model.")
    if key == "strategy":
        comment += f"; default of a single cell, while a sweep (-m) runs {', '.join(default_strategies())}"
    if key in groups() and names:
        comment += f" [{', '.join(options(key))}]"
    return key if is_open else f"{key}={default}", comment


def _option_table(group: str, default: str) -> list[str]:
    """Return an empty line and the options of a choice with their marks; nothing for a single option."""
    names = options(group)
    marks = {default: "*"} | (dict.fromkeys(default_strategies(), "m") if group == "strategy" else {})
    rows = [(f"{marks.get(name, ' ')} {group}={name}", option_description(group, name)) for name in names]
    return ["", *_two_columns(rows)] if len(names) > 1 else []


def option_description(group: str, name: str) -> str:
    """Return the first sentence of an option's file, or of the docstring of a plug-in's facts."""
    path = CONF / group / f"{name}.yaml"
    if path.exists():
        comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
        text = " ".join(line for line in comments if not line.startswith("@"))
        return re.split(r"(?<=[.?]) ", text)[0].rstrip(".")
    try:
        text = type(STRATEGIES[name]).__doc__ or ""
    except ConfigError:
        return "from an installed package, but cannot be loaded"
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "from an installed package"


def _two_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of a table of two columns; a left text over MAX_LEFT_COLUMN gets a separate line."""
    width = min(MAX_LEFT_COLUMN, max((len(left) for left, _ in rows), default=0))
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, MAX_LINE - width - 4, break_on_hyphens=False) or [""]
        first, *rest = wrapped if len(left) <= width else ["", *wrapped]
        lines += [f"  {left:<{width}}  {first}".rstrip(), *(f"  {'':<{width}}  {line}" for line in rest)]
    return lines
