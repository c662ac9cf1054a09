"""What `--help` prints: every choice and every key in a line, from the comments of conf/."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.command import sweep_words
from bench.config import DEALS, DTYPE_BYTES, LEASES, MASKS, NO_MISTAKE, PACKING, SCHEDULES, ConfigError
from bench.labels import shown
from bench.mistakes import MISTAKES
from bench.request.choices import CONF, default_strategies, groups, options
from bench.request.resolve import KNOWN_KEYS, LOSSES, strategy_keys
from bench.request.target import MODE_NAMES
from bench.strategies import STRATEGIES
from bench.strategies.options import in_words, in_yaml

COLUMNS, WIDEST = 110, 40
"""Of the page, and of what a line is about."""
HEAD = "Ulysses or Ring Attention? Measures both, with local attention as the base."
EXAMPLES: Sequence[tuple[str, str]] = (
    ("{program} --plan -m seq_len=8k,64k,96k", "what a sweep would run, how long, and what fits"),
    ("{program} -m seq_len=8k,64k,96k", "the sweep: {strategies}"),
    ("{program} strategy=ulysses seq_len=32k", "one cell"),
)
OPTIONS: Sequence[tuple[str, str]] = (
    ("-m, --multirun", "several values of a key are an axis, as in seq_len=8k,64k"),
    ("--plan", "resolve, list and estimate the cells; runs and writes nothing"),
    ("-c, --cfg job|hydra|all", "the composed configuration, as Hydra shows it"),
    ("-h, --help", "this"),
)
"""Options with what each is for."""
WORDS: Mapping[str, Sequence[str]] = {
    "mode": MODE_NAMES,
    "dtype": tuple(DTYPE_BYTES),
    "layout": tuple(LAYOUTS),
    "kernel": tuple(KERNEL_FACTS),
    "lease": LEASES,
    "loss": LOSSES,
    "mistake": (NO_MISTAKE, *MISTAKES),
    "optimizer.schedule": SCHEDULES,
    "data.deal": DEALS,
    "data.packing": PACKING,
    "cluster.device": ("cpu", "cuda"),
    "cluster.backend": ("nccl", "gloo"),
    "workload.mask": MASKS,
}
"""Keys whose values are one of some words."""
ALSO: Mapping[str, str] = {
    "model": "of a model chosen by name",
    "workload": "of workload=attention",
    "strategy": "of one strategy each",
}
"""Groups whose keys not every option has."""
IN_CONFIG = ("offload", "replay")
"""Groups whose keys stand in conf/config.yaml."""
LINE = re.compile(r"^ *(?P<key>\w+):\s*(?P<value>[^#]*?)\s*(?:#\s*(?P<words>.*))?$")
COMMANDS = "docs/commands.md"


def help_text() -> str:
    """The whole page, in lines of at most COLUMNS characters."""
    return "\n".join(
        [
            HEAD,
            "",
            *_examples(),
            "",
            "Choices (group=option); * is the default. When to take which: docs/choices.md",
            *(line for group in groups() for line in _choices(group)),
            "",
            "Any strategy may come from an installed package (CONTRIBUTING.md).",
            "",
            "Keys (key=value) with their defaults",
            *(line for section, keys in _sections().items() for line in _keys(section, keys)),
            "",
            "Options",
            *_two_columns(OPTIONS),
            "",
            f"Every command: {COMMANDS}",
        ]
    )


def described(group: str, name: str) -> str:
    """An option's line: the first sentence of its file, or of a plugin's facts."""
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


def _examples() -> Iterator[str]:
    for command, said in EXAMPLES:
        yield f"  {command.format(program=sweep_words())}"
        yield f"      {said.format(strategies=', '.join(default_strategies()))}"


def _choices(group: str) -> list[str]:
    default = _defaults().get(group)
    names = options(group)
    rows = [(f"{'* ' if name == default else '  '}{group}={name}", described(group, name)) for name in names]
    return ["", *_two_columns(rows)] if len(names) > 1 else []


def _defaults() -> Mapping[str, str]:
    """The option of each group that is taken where nobody names one."""
    listed = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").defaults)
    assert isinstance(listed, list)
    found: dict[str, str] = {}
    for each in listed:
        if isinstance(each, Mapping):
            found |= {str(group): str(name) for group, name in each.items()}
    return found


def _sections() -> Mapping[str, Sequence[str]]:
    """Groups of keys in the order in which they are told, those of a cell itself first."""
    groups_of_keys = {
        "": KNOWN_KEYS[""],
        **{group: KNOWN_KEYS[group] for group in IN_CONFIG},
        "strategy": strategy_keys(),
        **{group: names for group, names in KNOWN_KEYS.items() if group not in ("", *IN_CONFIG)},
    }
    chosen = groups()
    return {
        group: [name for name in names if name != "name" and (group or name not in chosen)]
        for group, names in groups_of_keys.items()
    }


def _keys(section: str, keys: Sequence[str]) -> list[str]:
    prefix, lines = f"{section}." if section else "", _lines(section)
    rows = [
        (_shown(f"{prefix}{key}", value), _with_words(f"{prefix}{key}", words))
        for key, (value, words) in lines.items()
        if key in keys
    ]
    title = [f"  {ALSO[section]}:"] if section in ALSO else []
    return ["", *title, *_two_columns(rows)] if rows else []


def _shown(key: str, value: str) -> str:
    """The key with its default, where it has one that is the same for all."""
    return key if value.startswith("${") or key.startswith("model.") else f"{key}={value}"


def _with_words(key: str, said: str) -> str:
    if key not in WORDS:
        return said
    words = ", ".join(WORDS[key])
    return said if words in said else f"{said} [{words}]".strip()


def _lines(section: str) -> dict[str, tuple[str, str]]:
    """Each key's default and comment: of a choice those of its default option, else of the first with it."""
    if section in ("", *IN_CONFIG):
        return _lines_of(CONF / "config.yaml")
    default = CONF / section / f"{_defaults().get(section)}.yaml"
    files = sorted((CONF / section).glob("*.yaml"), key=lambda file: (file != default, file))
    found: dict[str, tuple[str, str]] = {}
    for lines in map(_lines_of, files):
        for key, (value, words) in lines.items():
            known = found.get(key, (value, words))
            found[key] = known[0], known[1] or words
    if section == "strategy":
        for facts in STRATEGIES.usable():
            for key, own in facts.options.items():
                found.setdefault(key, (shown(in_yaml(own)), f"of strategy={facts.name}: {in_words(own)}"))
    return found


def _lines_of(file: Path) -> dict[str, tuple[str, str]]:
    """The keys of a file with a value, by their own names: sections share none."""
    matches = map(LINE.match, file.read_text().splitlines())
    return {each["key"]: (each["value"], each["words"] or "") for each in matches if each and each["value"]}


def _two_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of a name and what it is; a name longer than WIDEST has a line of its own."""
    width = min(WIDEST, max((len(left) for left, _ in rows), default=0))
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, COLUMNS - width - 4, break_on_hyphens=False) or [""]
        first, *rest = wrapped if len(left) <= width else ["", *wrapped]
        lines += [f"  {left:<{width}}  {first}".rstrip(), *(f"  {'':<{width}}  {each}" for each in rest)]
    return lines
