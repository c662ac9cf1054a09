"""Hugging Face's post on Ulysses in one command: its lengths on 4 GPUs, and its base of one GPU.

With one to three GPUs one rank of each cell is replayed. Without a GPU the cells are predicted for H100s,
unless the request names a model that is small enough for CPU ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from bench.attention.kernel_facts import FLASH_ATTN, KERNEL_FACTS
from bench.common.environment import Machine
from bench.config import AUTO, Cell
from bench.request import values
from bench.request.choices import Raw, read_option
from bench.request.legality import refusal
from bench.request.model_numbers import model_config
from bench.request.modes import PREDICT, REPLAY
from bench.request.resolve import resolve
from bench.training.parameters import parameters

RANKS = 4
HARDWARE, MODEL, STRATEGY, BASE = "h100_80gb", "qwen3_4b", "deepspeed_ulysses", "local"
STACK = "trl"
MOST_CPU_PARAMETERS = 20_000_000
"""Of a model that CPU ranks train in seconds a step at short lengths."""


def published_cells(raws: Sequence[Raw], machine: Machine) -> list[Cell]:
    """The lengths with shared sequences, and one rank with the shortest.

    What a request names is taken as it is. Raises ConfigError for an invalid value.
    """
    shortest = min(values.tokens("seq_len", length) for raw in raws for length in _listed(raw["seq_len"]))
    alone = {"strategy": read_option("strategy", BASE), "sp_degree": 1, "layout": AUTO, "seq_len": shortest}
    cells = [
        resolve({**named, **point}, machine)
        for raw in raws
        for named in _named(raw, machine)
        for point in (alone, *({"seq_len": length} for length in _listed(raw["seq_len"])))
    ]
    return [cell for cell in cells if cell.trainer != STACK or refusal(cell) is None]


def opening(raws: Sequence[Raw], machine: Machine) -> str:
    """What is about to happen, before anything else is said."""
    named = next(_named(raws[0], machine))
    note = "" if _has_stack() else f"; {STACK} is not installed: native only"
    if named["mode"] == PREDICT:
        ranks, hardware = named["cluster"]["world_size"], named["hardware"]["name"]
        return (
            f"predicted, not measured: arithmetic for {ranks} x {hardware}, as this machine has"
            f" {len(machine.gpus)} GPUs; model=qwen3_nano seq_len=1k,2k measures on CPU ranks{note}"
        )
    if named["mode"] == REPLAY:
        ranks = named["cluster"]["world_size"]
        return f"replayed on this machine, {machine.device_name}: one rank of {ranks}; native only"
    return f"measured on this machine, {machine.device_name}{note}"


def _named(raw: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    """The request with the post's choices in place of what it leaves open."""
    mode = _mode(raw, machine)
    asked = raw.get("model") or {}
    model = asked if "name" in asked else {**read_option("model", MODEL), **asked}
    strategy = raw.get("strategy") or read_option("strategy", STRATEGY)
    ranks, hardware = raw["cluster"]["world_size"], raw["hardware"]
    cluster = {**raw["cluster"], "world_size": RANKS if ranks == AUTO else ranks}
    if mode == PREDICT and hardware["name"] == AUTO:
        hardware = {"name": HARDWARE}
    made = {"model": model, "strategy": strategy, "cluster": cluster, "hardware": hardware}
    full = {**raw, **made, "mode": mode}
    has_kernel = bool(machine.gpus) and KERNEL_FACTS[FLASH_ATTN].is_installed
    own_kernel = {"kernel": FLASH_ATTN} if raw["kernel"] == AUTO and has_kernel else {}
    stacks = [{"name": name} for name in (*([STACK] if _has_stack() else []), "native")]
    for trainer in [raw["trainer"]] if raw.get("trainer") else stacks:
        kernel = own_kernel if trainer["name"] == STACK else {}
        for optimizer in _listed(raw["offload"]["optimizer"]):
            offload = {**raw["offload"], "optimizer": optimizer}
            yield {**full, **kernel, "trainer": trainer, "offload": offload}


def _listed(asked: Any) -> list[Any]:
    return asked if isinstance(asked, list) else [asked]


def _mode(raw: Raw, machine: Machine) -> str:
    """The mode that was asked for; else `measure` on enough GPUs, or with a model for CPU ranks.

    On fewer GPUs it is `replay`, without one `predict`. GPUs that are there and cannot be used are no reason
    to predict: resolving the cells says why.
    """
    if raw["mode"] is not None:
        return str(raw["mode"])
    model = raw.get("model") or {}
    is_small = "name" in model and parameters(model_config(model, 0)) <= MOST_CPU_PARAMETERS
    is_broken = machine.gpu_error is not None and raw["cluster"]["device"] != "cpu"
    if is_small or is_broken or len(machine.gpus) >= RANKS:
        return "measure"
    can_replay = machine.gpus and raw["cluster"]["device"] != "cpu" and raw["hardware"]["name"] == AUTO
    return REPLAY if can_replay else PREDICT


def _has_stack() -> bool:
    return find_spec(STACK) is not None
