"""What is compared: implementations, and the settings in which each is given the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from bench.config import ConfigError, RunConfig
from bench.environment import Machine
from bench.labels import length_label
from bench.request import values
from bench.request.composition import composed
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts
from bench.strategies.options import FALSE, TRUE, Flag, Option, WholeNumber

WITHOUT_EFFECT = ("checkpoints", "inner")
"""Options that one call on one node does not know: what layers keep, and whose ranks are neighbours."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One call of attention: how many ranks share how long a sequence of which heads."""

    ranks: int
    seq_len: int
    num_heads: int
    num_kv_heads: int

    @property
    def label(self) -> str:
        heads = f"{self.num_heads} query and {self.num_kv_heads} KV heads"
        return f"{self.ranks} ranks, {length_label(self.seq_len)} tokens, {heads}"

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        return [
            "workload=attention",
            f"cluster.world_size={self.ranks}",
            f"seq_len={self.seq_len}",
            f"model.num_heads={self.num_heads}",
            f"model.num_kv_heads={self.num_kv_heads}",
        ]


def default_words(words: Sequence[str], machine: Machine) -> list[str]:
    """The words, with a model where they name none: no weight of it is built, its heads are its shape."""
    if any(word.startswith("model=") for word in words):
        return [*words]
    return [f"model={'qwen3_8b' if machine.gpus else 'qwen3_nano'}", *words]


@dataclass(frozen=True, slots=True)
class Entrant:
    """One implementation in one setting."""

    cell: RunConfig
    label: str
    """Its strategy, with every choice that is not the default."""
    counterpart: str | None
    """The label of ours that it is held against."""

    @property
    def is_ours(self) -> bool:
        return STRATEGIES[self.cell.strategy].package is None


@dataclass(frozen=True, slots=True)
class Refused:
    """One that does not run in a setting."""

    label: str
    reason: str


def settings(ranks: str, lengths: str, heads: str) -> list[Setting]:
    """All settings of lists such as `2,4`, `1k,4k` and `4/2,16/16`; raises ConfigError for a bad value."""
    axes = product(
        [values.whole("--ranks", each, least=2) for each in ranks.split(",")],
        [values.tokens("--lengths", each) for each in lengths.split(",")],
        [_heads(each) for each in heads.split(",")],
    )
    return [Setting(count, length, *both) for count, length, both in axes]


def entrants(setting: Setting, words: Sequence[str], machine: Machine) -> tuple[list[Entrant], list[Refused]]:
    """Every implementation, those of ours in each layout that a package is compared in, and who is refused.

    Raises ConfigError where the words are wrong, or nothing of ours runs in the setting.
    """
    found = dict[str, Entrant]()
    refused = list[Refused]()
    for facts in STRATEGIES.usable():
        if not facts.shares_sequences:
            continue
        for chosen in _choices(facts):
            cell = _cell([f"strategy={facts.name}", *chosen], setting, words, machine)
            label = _label(facts, chosen)
            reason = refusal(cell)
            if reason is not None:
                refused.append(Refused(label, reason))
                continue
            counterpart = _counterpart(facts, cell, setting, words, machine)
            like = None if counterpart is None else counterpart.label
            if counterpart is not None:
                found.setdefault(counterpart.label, counterpart)
            found[label] = Entrant(cell, label, like)
    if not any(each.is_ours for each in found.values()):
        why = "; ".join(each.reason for each in refused) or "no strategy shares sequences"
        raise ConfigError(f"{setting.label}: none of ours runs: {why}")
    return [*found.values()], refused


def _heads(text: str) -> tuple[int, int]:
    query, slash, kv = text.partition("/")
    if not slash:
        raise ConfigError(f"--heads={text}: name query heads and KV heads, such as 16/2")
    return values.whole("--heads", query, least=1), values.whole("--heads", kv, least=1)


def _choices(facts: Facts) -> Iterator[list[str]]:
    """The words of every combination of a strategy's own options; of a number its own choice alone."""
    keys = [
        key
        for key, option in facts.options.items()
        if not isinstance(option, WholeNumber) and key not in WITHOUT_EFFECT
    ]
    for chosen in product(*(_values(facts.options[key]) for key in keys)):
        yield [f"strategy.{key}={value}" for key, value in zip(keys, chosen, strict=True)]


def _values(option: Option) -> tuple[str, ...]:
    if isinstance(option, Flag):
        return (TRUE, FALSE) if option.default else (FALSE, TRUE)
    assert not isinstance(option, WholeNumber)
    return option


def _label(facts: Facts, chosen: Sequence[str]) -> str:
    """`torch_cp rotation=alltoall`: choices that are the default are left out."""
    default = next(_choices(facts))
    own = [word.removeprefix("strategy.") for word in chosen if word not in default]
    return " ".join([facts.name, *own])


def _counterpart(
    facts: Facts, cell: RunConfig, setting: Setting, words: Sequence[str], machine: Machine
) -> Entrant | None:
    """Ours that it is held against, in the same layout, of a package with its kernel and degrees too."""
    name = facts.counterpart(cell)
    if name is None:
        return None
    ours = STRATEGIES[name]
    layout = cell.layout if cell.layout in ours.layouts else ours.default_layout
    same = _cell(
        [f"strategy={name}", f"layout={layout}", *_kernel(facts, cell), *_degree(ours, cell)],
        setting,
        words,
        machine,
    )
    reason = refusal(same)
    if reason is not None:
        return None
    default = _cell([f"strategy={name}"], setting, words, machine)
    own = [
        *([layout] if layout != default.layout else []),
        *([same.kernel] if same.kernel != default.kernel else []),
        *(_degree(ours, cell) if same.ulysses_degree != default.ulysses_degree else []),
    ]
    return Entrant(same, " ".join([name, *own]), None)


def _kernel(facts: Facts, cell: RunConfig) -> list[str]:
    """A package's, for code to be compared with code; ours is held against ours as each runs best."""
    return [] if facts.package is None else [f"kernel={cell.kernel}"]


def _degree(ours: Facts, cell: RunConfig) -> list[str]:
    """The words for the degrees of a hybrid."""
    return [f"ulysses_degree={cell.ulysses_degree}"] if ours.is_hybrid else []


def _cell(own: Sequence[str], setting: Setting, words: Sequence[str], machine: Machine) -> RunConfig:
    return resolve(composed(*default_words(words, machine), *own, *setting.words), machine)
