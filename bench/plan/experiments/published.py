"""Cells of Hugging Face's post on Ulysses: the post's lengths on 4 GPUs, and its base on one GPU.

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
POST_TRAINER = "trl"
"""Trainer of the post, used if it is installed."""
MOST_CPU_PARAMETERS = 20_000_000
"""Largest model that CPU ranks train in seconds per step at short lengths."""


def published_cells(raws: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return a cell with shared sequences for each length, and a one-rank cell of the shortest length.

    Values in a request replace those of the post. Raises ConfigError for an invalid value.
    """
    shortest = min(values.tokens("seq_len", length) for raw in raws for length in _as_list(raw["seq_len"]))
    alone = {"strategy": read_option("strategy", BASE), "sp_degree": 1, "layout": AUTO, "seq_len": shortest}
    cells = [
        resolve({**request, **point}, machine)
        for raw in raws
        for request in _complete_requests(raw, machine)
        for point in (alone, *({"seq_len": length} for length in _as_list(raw["seq_len"])))
    ]
    return [cell for cell in cells if cell.trainer != POST_TRAINER or refusal(cell) is None]


def mode_line(raws: Sequence[Raw], machine: Machine) -> str:
    """Return the line that states whether the cells are measured, replayed or predicted."""
    request = next(_complete_requests(raws[0], machine))
    note = "" if _has_post_trainer() else f"; {POST_TRAINER} is not installed, so only trainer=native"
    if request["mode"] == PREDICT:
        ranks, hardware = request["cluster"]["world_size"], request["hardware"]["name"]
        return (
            f"predicted for {ranks} x {hardware} and not measured, because this machine has"
            f" {len(machine.gpus)} GPUs; model=qwen3_nano seq_len=1k,2k measures on CPU ranks{note}"
        )
    if request["mode"] == REPLAY:
        ranks = request["cluster"]["world_size"]
        return f"replayed on this machine, {machine.device_name}: one rank of {ranks}; only trainer=native"
    return f"measured on this machine, {machine.device_name}{note}"


def _complete_requests(raw: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the request with the post's choices for all that it leaves open."""
    mode = _mode(raw, machine)
    requested = raw.get("model") or {}
    model = requested if "name" in requested else {**read_option("model", MODEL), **requested}
    strategy = raw.get("strategy") or read_option("strategy", STRATEGY)
    ranks, hardware = raw["cluster"]["world_size"], raw["hardware"]
    cluster = {**raw["cluster"], "world_size": RANKS if ranks == AUTO else ranks}
    if mode == PREDICT and hardware["name"] == AUTO:
        hardware = {"name": HARDWARE}
    choices = {"model": model, "strategy": strategy, "cluster": cluster, "hardware": hardware}
    full = {**raw, **choices, "mode": mode}
    has_kernel = bool(machine.gpus) and KERNEL_FACTS[FLASH_ATTN].is_installed
    post_kernel = {"kernel": FLASH_ATTN} if raw["kernel"] == AUTO and has_kernel else {}
    trainers = [{"name": name} for name in (*([POST_TRAINER] if _has_post_trainer() else []), "native")]
    for trainer in [raw["trainer"]] if raw.get("trainer") else trainers:
        kernel = post_kernel if trainer["name"] == POST_TRAINER else {}
        for optimizer in _as_list(raw["offload"]["optimizer"]):
            offload = {**raw["offload"], "optimizer": optimizer}
            yield {**full, **kernel, "trainer": trainer, "offload": offload}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _mode(raw: Raw, machine: Machine) -> str:
    """Return the requested mode; else `measure` with enough GPUs or a model for CPU ranks.

    With fewer GPUs it is `replay`, without a GPU `predict`. For GPUs that cannot be used it is `measure`,
    because resolving the cells then states the reason.
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


def _has_post_trainer() -> bool:
    return find_spec(POST_TRAINER) is not None
