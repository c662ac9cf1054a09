"""Cells of the experiments published_*, which repeat the measurements of Hugging Face's post on Ulysses.

These are cells with the post's lengths on 4 GPUs, and the cell on one GPU that the post compares them with.

With one to three GPUs one rank of each cell is replayed. Without a GPU the cells are predicted for H100s,
unless the request names a model that is small enough for CPU ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from bench.attention.kernel_facts import DEFAULT_KERNEL, FLASH_ATTN, KERNEL_FACTS
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


def published_cells(requests: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return a cell whose ranks share a sequence for each length, and a one-rank cell of the shortest length.

    Each is planned once for each trainer and each value of `offload.optimizer`. Values in a request replace
    those of the post. Raises ConfigError for an invalid value.
    """
    lengths = (length for request in requests for length in _as_list(request["seq_len"]))
    shortest = min(values.tokens("seq_len", length) for length in lengths)
    strategy = read_option("strategy", BASE)
    one_rank = {"strategy": strategy, "sp_degree": 1, "layout": AUTO, "seq_len": shortest}
    cells = [
        resolve({**complete, **changes}, machine)
        for request in requests
        for complete in _complete_requests(request, machine)
        for changes in (one_rank, *({"seq_len": length} for length in _as_list(request["seq_len"])))
    ]
    return [cell for cell in cells if cell.trainer != POST_TRAINER or refusal(cell) is None]


def mode_line(requests: Sequence[Raw], machine: Machine) -> str:
    """Return the line that states whether the cells are measured, replayed or predicted."""
    complete = next(_complete_requests(requests[0], machine))
    note = "" if _has_post_trainer() else f"; {POST_TRAINER} is not installed, so only trainer=native"
    if complete["mode"] == PREDICT:
        ranks, hardware = complete["cluster"]["world_size"], complete["hardware"]["name"]
        return (
            f"predicted for {ranks} x {hardware} and not measured, because this machine has"
            f" {len(machine.gpus)} GPUs; model=qwen3_nano seq_len=1k,2k measures on CPU ranks{note}"
        )
    if complete["mode"] == REPLAY:
        ranks = complete["cluster"]["world_size"]
        return f"replayed on this machine, {machine.device_name}: one rank of {ranks}; only trainer=native"
    return f"measured on this machine, {machine.device_name}{note}"


def _complete_requests(request: Raw, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the request with the post's choices where it makes none, for each trainer and each offload."""
    mode = _mode(request, machine)
    requested = request.get("model") or {}
    model = requested if "name" in requested else {**read_option("model", MODEL), **requested}
    strategy = request.get("strategy") or read_option("strategy", STRATEGY)
    ranks, hardware = request["cluster"]["world_size"], request["hardware"]
    cluster = {**request["cluster"], "world_size": RANKS if ranks == AUTO else ranks}
    if mode == PREDICT and hardware["name"] == AUTO:
        hardware = {"name": HARDWARE}
    choices = {"model": model, "strategy": strategy, "cluster": cluster, "hardware": hardware}
    complete = {**request, **choices, "mode": mode}
    has_kernel = bool(machine.gpus) and KERNEL_FACTS[FLASH_ATTN].is_installed
    is_auto = request["kernel"] == AUTO  # the post's kernel is FlashAttention-2
    trainers = [{"name": name} for name in (*([POST_TRAINER] if _has_post_trainer() else []), "native")]
    for trainer in [request["trainer"]] if request.get("trainer") else trainers:
        is_post = has_kernel and trainer["name"] == POST_TRAINER
        kernel = {"kernel": FLASH_ATTN if is_post else DEFAULT_KERNEL} if is_auto else {}
        for optimizer in _as_list(request["offload"]["optimizer"]):
            offload = {**request["offload"], "optimizer": optimizer}
            yield {**complete, **kernel, "trainer": trainer, "offload": offload}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _mode(request: Raw, machine: Machine) -> str:
    """Return the requested mode, or the mode that this machine allows.

    That is `measure` with RANKS GPUs or a model for CPU ranks, `replay` with fewer GPUs, and `predict`
    without a GPU. If GPUs cannot be used it is also `measure`, because resolving the cells then reports the
    reason.
    """
    if request["mode"] is not None:
        return str(request["mode"])
    model = request.get("model") or {}
    is_small = "name" in model and parameters(model_config(model, 0, seq_len=1)) <= MOST_CPU_PARAMETERS
    may_use_gpus = request["cluster"]["device"] != "cpu"
    is_broken = machine.gpu_error is not None and may_use_gpus
    if is_small or is_broken or len(machine.gpus) >= RANKS:
        return "measure"
    can_replay = machine.gpus and may_use_gpus and request["hardware"]["name"] == AUTO
    return REPLAY if can_replay else PREDICT


def _has_post_trainer() -> bool:
    return find_spec(POST_TRAINER) is not None
