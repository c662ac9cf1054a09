"""Text of `--help` and `--help-all`: choices and keys with their defaults, from the comments of conf/."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common.command import sweep_words
from bench.common.labels import shown
from bench.config import ConfigError
from bench.request.choices import CONF, default_strategies, groups, options
from bench.request.resolve import all_keys
from bench.strategies import STRATEGIES
from bench.strategies.options import in_words, in_yaml

COLUMNS, WIDEST = 110, 40
"""Largest width of the page, and of its left column."""
HEAD = "Ulysses or Ring Attention? Measures both, with local attention as the base."
EXAMPLES: Sequence[tuple[str, str]] = (
    ("{program} --plan -m seq_len=8k,64k,96k", "what a sweep would run, how long, and what fits"),
    ("{program} -m seq_len=8k,64k,96k", "the sweep: {strategies}, unless strategy= names others"),
    ("{program} strategy=ulysses seq_len=32k", "one cell"),
)
OPTIONS: Sequence[tuple[str, str]] = (
    ("-m, --multirun", "several values of a key are an axis, as in seq_len=8k,64k"),
    ("--plan", "resolve, list and estimate the cells; runs and writes nothing"),
    ("-c, --cfg job|hydra|all", "the composed configuration, as Hydra shows it"),
    ("-h, --help", "the common keys"),
    ("--help-all", "every key and every option of a choice"),
)
COMMON = (
    *("strategy", "model", "engine", "trainer", "workload", "data", "hardware", "cluster", "experiment"),
    *("mode", "seq_len", "batch", "grad_accum", "dtype", "layout", "kernel"),
    *("sp_degree", "ulysses_degree", "dp_replicate", "dp_shard"),
    *("checkpointing", "loss", "tiled_mlp", "offload.activations", "offload.optimizer"),
    *("seed", "env", "resume", "sweep_dir", "model.path", "data.path", "data.packing"),
    *("cluster.world_size", "cluster.memory_limit_gib", "cluster.nodes"),
    *("measure.steps", "measure.warmup_steps", "measure.budget_s", "measure.repeats", "measure.timeout_s"),
)
"""Keys of `--help`."""
LINE = re.compile(r"^(?P<indent>[ -]*)(?P<key>\w+):\s*(?P<value>[^#]*?)\s*(?:#\s*(?P<words>.*))?$")


def help_text(*, whole: bool = False) -> str:
    """Return the page, in lines of at most COLUMNS characters: the COMMON keys, or with `whole` all."""
    lines, program, strategies = key_lines(), sweep_words(), ", ".join(default_strategies())
    page = [HEAD, ""]
    for command, meaning in EXAMPLES:
        page += [f"  {command.format(program=program)}", f"      {meaning.format(strategies=strategies)}"]
    page += ["", "Choices and keys (key=value) with their defaults. When to take which: docs/choices.md"]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in lines):
        keys = [key for key in lines if key.rpartition(".")[0] == section and (whole or key in COMMON)]
        page += ["", *_two_columns([_row(key, *lines[key], names=not whole) for key in keys])] if keys else []
    if whole:
        page += ["", "Options of each choice: * is the default, m is what a sweep (-m) runs by default"]
        page += [line for group in groups() for line in _options(group, lines[group][0])]
        page += ["", "Any strategy may come from an installed package: docs/your_strategy.md"]
    page += ["", "Options of the command line", *_two_columns(OPTIONS), "", "Every command: docs/commands.md"]
    return "\n".join(page)


def key_lines() -> dict[str, tuple[str, str]]:
    """Return each key's default and comment; of a group's key those of its default option, if that has it."""
    lines = {key: (value, words) for key, value, words in _lines_of(CONF / "config.yaml")}
    for group in groups():
        default = CONF / group / f"{lines[group][0]}.yaml"
        for file in sorted((CONF / group).glob("*.yaml"), key=lambda file: (file != default, file)):
            for key, value, words in _lines_of(file, group):
                lines.setdefault(key, (value, words))
    for facts in STRATEGIES.usable():
        for name, own in facts.options.items():
            words = f"of strategy={facts.name}: {in_words(own)}"
            lines.setdefault(f"strategy.{name}", (shown(in_yaml(own)), words))
    known = all_keys()
    return {key: line for key, line in lines.items() if key in known}


def _lines_of(file: Path, group: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, default and comment of each line with a comment; only top-level lines of a group's file."""
    section = group
    for match in filter(None, map(LINE.match, file.read_text().splitlines())):
        indent, key, value, words = match["indent"], match["key"], match["value"], match["words"]
        section = section if indent else group
        if not value:
            section = "" if key == "defaults" else key
        elif words and not (indent and group):
            yield f"{section}.{key}".lstrip("."), value, words


def _row(key: str, default: str, words: str, *, names: bool) -> tuple[str, str]:
    """Return a key's two columns; a default that each model or sweep has for itself is left out."""
    is_open = default.startswith("${") or key.startswith("model.")
    if key == "strategy":
        words += f"; the default of one cell: a sweep (-m) runs {', '.join(default_strategies())}"
    if key in groups() and names:
        words += f" [{', '.join(options(key))}]"
    return key if is_open else f"{key}={default}", words


def _options(group: str, default: str) -> list[str]:
    names = options(group)
    marks = {default: "*"} | (dict.fromkeys(default_strategies(), "m") if group == "strategy" else {})
    rows = [(f"{marks.get(name, ' ')} {group}={name}", described(group, name)) for name in names]
    return ["", *_two_columns(rows)] if len(names) > 1 else []


def described(group: str, name: str) -> str:
    """Return an option's line: the first sentence of its file, or of a plug-in's facts."""
    path = CONF / group / f"{name}.yaml"
    if path.exists():
        comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
        text = " ".join(line for line in comments if not line.startswith("@"))
        return re.split(r"(?<=[.?]) ", text)[0].rstrip(".")
    try:
        text = type(STRATEGIES[name]).__doc__ or ""
    except ConfigError:
        return "offered by an installed package, and cannot be loaded"
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "offered by an installed package"


def _two_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return rows of a name and its meaning; a name longer than WIDEST has a line of its own."""
    width = min(WIDEST, max((len(left) for left, _ in rows), default=0))
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, COLUMNS - width - 4, break_on_hyphens=False) or [""]
        first, *rest = wrapped if len(left) <= width else ["", *wrapped]
        lines += [f"  {left:<{width}}  {first}".rstrip(), *(f"  {'':<{width}}  {each}" for each in rest)]
    return lines
