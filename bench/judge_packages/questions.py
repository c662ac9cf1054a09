"""What is asked of a package's strategy: one choice at a time, beside a base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.config import RunConfig
from bench.environment import Machine
from bench.request.composition import composed
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts

COMMON = (
    "cluster=cpu", "model=qwen3_nano", "seq_len=256", "measure.steps=1", "measure.warmup_steps=0",
    "measure.trace=false", "measure.repeats=1", "measure.timeout_s=90",
)  # fmt: skip
ATTENTION = ("workload=attention",)
"""One call, forward and backward, in any dtype and under either mask."""
TRAIN = ("workload=train",)
BASE = "bf16, 4:2 heads, causal"
CHOICES: Mapping[str, tuple[str, ...]] = {
    BASE: ATTENTION,
    "fp16": (*ATTENTION, "dtype=fp16"),
    "fp32": (*ATTENTION, "dtype=fp32"),
    "4:4 heads": (*ATTENTION, "model.num_kv_heads=4"),
    "4:1 heads": (*ATTENTION, "model.num_kv_heads=1"),
    "full mask": (*ATTENTION, "workload.mask=full"),
    "documents": (*TRAIN, "engine=zero3", "data.packing=documents"),
    "ddp": (*TRAIN, "engine=ddp"),
    "fsdp2": (*TRAIN, "engine=fsdp2"),
    "zero3": (*TRAIN, "engine=zero3"),
}
"""What is asked, by the table's column: each changes one thing of the base, for attention or for a step."""
RANKS, HYBRID = ("cluster.world_size=2",), ("cluster.world_size=4", "ulysses_degree=2")
"""A hybrid has two in each direction."""
INNER = "inner"
"""Which ranks are neighbours changes no answer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One strategy of a package, in one layout and with one value of each choice of its own."""

    facts: Facts
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The strategy and its choices."""
        return " ".join((self.facts.name, *self.words))

    def cell(self, choice: str, machine: Machine) -> RunConfig:
        """The cell that answers, whether we would refuse it or not."""
        ranks = HYBRID if self.facts.is_hybrid else RANKS
        words = (f"strategy={self.facts.name}", *ranks, *COMMON, *self.words, *CHOICES[choice])
        return resolve(composed(*words), machine)


def subjects(names: tuple[str, ...] = ()) -> Iterator[Subject]:
    """Those of the strategies with these names, or of all that have a package."""
    for facts in STRATEGIES.usable():
        if facts.package is None or (names and facts.name not in names):
            continue
        for layout in facts.layouts:
            for choice in _own_choices(facts):
                if layout in facts.layouts_with(choice):
                    of_layout = [f"layout={layout}"] if len(facts.layouts) > 1 else []
                    yield Subject(facts, (*of_layout, *_of_choice(choice)))


def _own_choices(facts: Facts) -> Iterator[dict[str, str]]:
    """Each value of its own words; one strategy has one such word at most."""
    words = {key: option for key, option in facts.options.items() if isinstance(option, tuple)}
    asked = {key: values for key, values in words.items() if key != INNER}
    if not asked:
        yield {}
    for key, values in asked.items():
        for value in values:
            yield {key: value}


def _of_choice(choice: Mapping[str, str]) -> Iterator[str]:
    for key, value in choice.items():
        yield f"strategy.{key}={value}"
        if value == "p2p":  # on CPU ranks ringmaster passes keys with a kernel of its own
            yield "kernel=math"
