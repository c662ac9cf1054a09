"""ALST's ablation: one switch after another, on one length, the same tokens in every row's step.

Rows follow the recipes of ALST's authors (snowflakedb/ArcticTraining, projects/sequence-parallelism), which
start with checkpointing on and the optimizer on the CPU; here these two are rows as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.config import ConfigError, RunConfig
from bench.environment import Machine
from bench.labels import shown
from bench.request.choices import Raw, read_option
from bench.request.placement import place, shared_ranks
from bench.request.resolve import resolve
from bench.request.target import target_machine

OWN: Mapping[str, Any] = {
    "checkpointing": False,
    "loss": "untiled",
    "tiled_mlp": False,
    "offload": {"activations": False, "optimizer": False},
    "grad_accum": 1,
    "sp_degree": "auto",
    "dp_shard": "auto",
}
"""What the rows choose themselves: in conf/ as nobody named it."""
ROWS: Sequence[tuple[str, ...]] = (
    (),
    ("checkpointing",),
    ("checkpointing", "optimizer"),
    ("checkpointing", "optimizer", "loss"),
    ("checkpointing", "optimizer", "loss", "shared"),
    ("checkpointing", "optimizer", "loss", "shared", "tiled_mlp"),
    ("checkpointing", "optimizer", "loss", "shared", "activations"),
    ("checkpointing", "optimizer", "loss", "shared", "activations", "tiled_mlp"),
)
"""What is switched on. `shared`: the ranks share each sequence, as the strategy has it; before, each has its
own, and a step has as many sequences in all."""
SMALL_MODEL: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 1024,
    "head_dim": 32,
    "vocab_size": 1536,
}
"""Of qwen3_nano on CPU ranks: activations and logits outweigh the weights, as they do at long lengths."""


def ablation_cells(raws: Sequence[Raw], machine: Machine) -> list[RunConfig]:
    """The rows of each request, in order. Raises ConfigError for an invalid value."""
    return [resolve(row, machine) for raw in raws for row in _rows(raw, machine)]


def _rows(raw: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    for key, value in OWN.items():
        if raw[key] != value:
            raise ConfigError(
                f"{key}={shown(raw[key])}: experiment=alst_ablation chooses it by row; leave it out"
            )
    where = place(raw["cluster"], target_machine(raw, machine))
    ranks = shared_ranks(where, where.world_size)
    model = _model(raw.get("model") or {}, on_cpu=where.device == "cpu")
    for on in ROWS:
        row = {**raw, "model": model}
        row["checkpointing"] = "checkpointing" in on
        row["loss"] = "chunked" if "loss" in on else "untiled"
        row["tiled_mlp"] = "tiled_mlp" in on
        row["offload"] = {key: key in on for key in OWN["offload"]}
        if "shared" in on:
            yield {**row, "grad_accum": ranks, "sp_degree": ranks, "dp_shard": 1}
        else:
            alone = read_option("strategy", "local")
            yield {**row, "strategy": alone, "grad_accum": 1, "sp_degree": 1, "dp_shard": ranks}


def _model(asked: Mapping[str, Any], *, on_cpu: bool) -> Mapping[str, Any]:
    """The model that the request names; else on CPU ranks the small one, with the numbers it names."""
    if "name" in asked:
        return asked
    chosen = {**read_option("model", "qwen3_nano"), **SMALL_MODEL} if on_cpu else read_option("model", "auto")
    return {**chosen, **asked}
