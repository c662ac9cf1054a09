"""From the user's words to a Cell: every value read once, every `auto` filled in, every rule checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.common.environment import Machine
from bench.common.labels import shown
from bench.config import (
    AUTO,
    DTYPE_BYTES,
    LEAVES,
    MASKS,
    NOT_USED,
    NUMA_BINDINGS,
    PACKING,
    SCHEDULES,
    UNKNOWN_HARDWARE,
    Cell,
    ClusterConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    MeasureConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    ReplayConfig,
    WorkloadConfig,
)
from bench.measure.workloads import WORKLOADS
from bench.request import values
from bench.request.choices import Raw, options
from bench.request.device_sections import env_pairs, measure_config
from bench.request.hardware import refuse_changed, this_hardware
from bench.request.model_numbers import model_config
from bench.request.modes import MEASURE, MODE_NAMES, PREDICT, REPLAY, target_machine, with_replayed_rank
from bench.request.placement import (
    GATHERED,
    Placement,
    degrees,
    memory_limit_gib,
    of_fewer_ranks,
    place,
    ranks_taken,
    threads_per_rank,
    unshared_degrees,
)
from bench.strategies import STRATEGIES
from bench.strategies.options import Flag, Option, WholeNumber, default_text, flag_text, in_yaml
from bench.training.engines import DEFAULT_ENGINE, ENGINE_FACTS
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.text import beginning, refuse_tokenizer
from bench.training.trainer_facts import STACK_ENGINE, TRAINER_FACTS, UNTILED

DATA, LOSSES = ("text", "synthetic"), ("chunked", "untiled")
"""Names in the tables of bench/training/data.py and loss.py, which import torch."""
AGENT_KEYS = ("address", "port")
"""Keys of `cluster` that say how agents are met: no cell's business."""
NO_KEYS = ("options", "padding", "inject_fault", "rank_order", "backend")
"""Fields of a cell and its sections that are derived, or that only an experiment sets."""


OF_A_SWEEP = ("lease", "plan", "resume", "sweep_dir")
"""Keys that decide nothing of a cell."""


def _names(section: type[Any]) -> list[str]:
    return [field.name for field in fields(section) if field.name not in NO_KEYS]


KNOWN_KEYS: Mapping[str, list[str]] = {
    "": [*_names(Cell), "length_step", "pad", *OF_A_SWEEP],
    "model": _names(ModelConfig),
    "engine": _names(EngineConfig),
    "optimizer": _names(OptimizerConfig),
    "trainer": ["name"],
    "workload": _names(WorkloadConfig),
    "data": _names(DataConfig),
    "cluster": [*_names(ClusterConfig), *AGENT_KEYS],
    "measure": _names(MeasureConfig),
    "offload": _names(OffloadConfig),
    "replay": _names(ReplayConfig),
    "experiment": ["name"],
}


def strategy_keys() -> list[str]:
    """The keys of `strategy`: its name, and every strategy's own options."""
    return ["name", *sorted({key for facts in STRATEGIES.usable() for key in facts.options})]


def resolve(raw: Raw, machine: Machine) -> Cell:
    """One cell from a composed configuration; raises ConfigError at the first value that is no good."""
    if raw["mode"] != MEASURE:
        machine = target_machine(raw, machine)
    cell, pads, rank = _resolved(raw, machine), values.flag("pad", raw["pad"]), raw["replay"]["rank"]
    if cell.mode == PREDICT:  # arithmetic gives the same each time, and is compared with nothing
        once = cell.measure if cell.measure.repeats == AUTO else replace(cell.measure, repeats=1)
        cell = replace(cell, measure=replace(once, reference_budget_s=0.0))
    if not cell.workload.trains:
        cell = _attention_alone(cell)
    elif pads:
        cell = _padded(cell)
    return cell if cell.mode != REPLAY and rank == AUTO else with_replayed_rank(cell, rank)


def _padded(cell: Cell) -> Cell:
    """The cell with as much padding as its layout needs, where it has legal degrees."""
    with STRATEGIES.plugin_errors_named(cell.strategy):
        facts = STRATEGIES[cell.strategy]
        if facts.degree_refusals(cell):
            return cell
        return replace(cell, padding=-cell.seq_len % facts.length_multiple(cell))


def _attention_alone(cell: Cell) -> Cell:
    """The cell of one layer's attention: settings that only training reads are all the same."""
    return replace(
        cell,
        model=replace(cell.model, num_layers=1, path=None),
        engine=EngineConfig(name=NOT_USED),
        optimizer=OptimizerConfig(name=NOT_USED),
        trainer=NOT_USED,
        grad_accum=1,
        checkpointing=False,
        tiled_mlp=False,
        offload=OffloadConfig(),
        measure=replace(cell.measure, gradients=False),
    )


def _resolved(raw: Raw, machine: Machine) -> Cell:
    _refuse_unknown(raw)
    strategy = values.choice("strategy", raw["strategy"]["name"], STRATEGIES)
    trainer = values.choice("trainer", raw["trainer"]["name"], TRAINER_FACTS)
    seq_len = values.tokens("seq_len", raw["seq_len"])
    where = place(raw["cluster"], machine)
    shares = STRATEGIES[strategy].shares_sequences
    spread = degrees(raw, where) if shares else unshared_degrees(raw, where, machine)
    ranks = ranks_taken(where, spread) if shares else spread.product
    model = model_config(raw["model"], len(machine.gpus) if where.device == "cuda" else 0)
    cell = Cell(
        seq_len=seq_len,
        batch=values.whole("batch", raw["batch"]),
        grad_accum=values.whole("grad_accum", raw["grad_accum"]),
        strategy=strategy,
        options=(),
        layout=AUTO,
        kernel=_kernel(raw["kernel"], STRATEGIES[strategy].kernels),
        dtype=values.choice("dtype", raw["dtype"], DTYPE_BYTES),
        model=model,
        engine=_engine(raw, strategy, trainer),
        optimizer=_optimizer(raw["optimizer"]),
        trainer=trainer,
        workload=WorkloadConfig(
            name=values.choice("workload", raw["workload"]["name"], WORKLOADS),
            mask=values.choice("workload.mask", raw["workload"].get("mask", "causal"), MASKS),
        ),
        data=_data(raw["data"], model.vocab_size),
        mode=values.choice("mode", raw["mode"], MODE_NAMES),
        hardware=_hardware(raw["hardware"], machine, where, raw["mode"]),
        cluster=_cluster(raw["cluster"], where, machine, ranks),
        sp_degree=spread.sp_degree,
        ulysses_degree=_ulysses_degree(raw, spread.sp_degree, model),
        dp_replicate=spread.dp_replicate,
        dp_shard=spread.dp_shard,
        checkpointing=_checkpointing(raw["checkpointing"], where.device),
        loss=_loss(raw["loss"], trainer),
        tiled_mlp=values.flag("tiled_mlp", raw["tiled_mlp"]),
        offload=values.section("offload", raw["offload"], OffloadConfig),
        measure=measure_config(raw["measure"], where.device),
        seed=values.whole("seed", raw["seed"], least=0),
        env=() if raw["env"] == {} else env_pairs(raw["env"], where.device),
        experiment=values.choice("experiment", raw["experiment"]["name"], options("experiment")),
    )
    own_choices = _options(raw["strategy"], cell)
    return replace(cell, options=own_choices, layout=_layout(raw["layout"], strategy, dict(own_choices)))


def _cluster(raw: Raw, where: Placement, machine: Machine, world_size: int) -> ClusterConfig:
    binding, limit = raw["numa_binding"], raw["memory_limit_gib"]
    cluster = ClusterConfig(
        name=where.name,
        world_size=where.world_size,
        nodes=where.nodes,
        network=None if raw["network"] is None else _network(raw["network"], where),
        ranks_per_gpu=min(where.ranks_per_gpu, where.world_size),
        device=where.device,
        backend="nccl" if where.device == "cuda" else "gloo",
        threads_per_rank=1,
        memory_limit_gib=limit if limit is None else memory_limit_gib(limit, where.device),
        numa_binding=binding if binding is None else _numa_binding(binding, where.device),
    )
    if world_size != where.world_size:
        cluster = of_fewer_ranks(cluster, world_size)
    return replace(cluster, threads_per_rank=threads_per_rank(raw, machine, world_size // cluster.nodes))


def _numa_binding(raw: Any, device: str) -> str:
    """Return which CPUs near its GPU a rank is bound to; refused where ranks run on CPUs."""
    if device == "cpu":
        raise ConfigError(f"cluster.numa_binding={raw}: the ranks run on the CPU, not on a GPU; leave it out")
    return values.choice("cluster.numa_binding", raw, NUMA_BINDINGS)


def _network(raw: Any, where: Placement) -> str:
    """Return the user's word for it, in which a number is a word too; refused where there is one node."""
    label = values.text("cluster.network", raw)
    if where.nodes == 1:
        raise ConfigError(
            f"cluster.network={label}: names the network between nodes, and cluster.nodes=1; leave it out"
        )
    return label


def _refuse_unknown(raw: Raw) -> None:
    """Hydra lets `+key=value` add anything; a key that is not read would silently have no effect.

    A strategy's own keys are its own business: `_options` reads them.
    """
    for path, known in KNOWN_KEYS.items():
        section = raw if path == "" else raw[path]
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}={shown(section)}: must be values by name; write {path}.{known[0]}=...")
        for key in section:
            if key not in known:
                name = f"{path}.{key}" if path else key
                raise ConfigError(f"{name}: {values.no_such_key(name, all_keys())}")


def all_keys() -> list[str]:
    """Every key of the command line, with its group in front."""
    known = {**KNOWN_KEYS, "strategy": strategy_keys()}
    return [f"{path}.{key}" if path else key for path, keys in known.items() for key in keys]


def _ulysses_degree(raw: Raw, sp_degree: int, model: ModelConfig) -> int:
    if raw["ulysses_degree"] == "auto":
        strategy = raw["strategy"]["name"]
        with STRATEGIES.plugin_errors_named(strategy):
            return STRATEGIES[strategy].ulysses_degree(sp_degree, model)
    return values.whole("ulysses_degree", raw["ulysses_degree"])


def _options(raw: Raw, cell: Cell) -> tuple[tuple[str, str], ...]:
    known = STRATEGIES[raw["name"]].options
    for key in raw:
        if key not in ("name", *known):
            near = values.nearest(key, known)
            way_out = f"did you mean strategy.{near}?" if near else "leave it out"
            raise ConfigError(f"strategy.{key}: {raw['name']} has no such option; {way_out}")
    with STRATEGIES.plugin_errors_named(raw["name"]):
        return tuple((key, _option(key, raw[key], own, cell)) for key, own in known.items())


def _option(key: str, value: Any, option: Option, cell: Cell) -> str:
    """One of a strategy's own choices, as a cell holds it."""
    name = f"strategy.{key}"
    if value == AUTO and in_yaml(option) == AUTO:
        return default_text(option, cell)
    if isinstance(option, Flag):
        return flag_text(values.flag(name, value))
    if isinstance(option, WholeNumber):
        return str(values.whole(name, value, least=option.least))
    return values.choice(name, value, option)


def _layout(raw: Any, strategy: str, options: Mapping[str, str]) -> str:
    if raw == "auto":
        return STRATEGIES[strategy].layouts_with(options)[0]
    return values.choice("layout", raw, LAYOUTS)


def _kernel(raw: Any, known: tuple[str, ...] | None) -> str:
    """One for all strategies; a strategy that cannot run on it has its own first one."""
    default = DEFAULT_KERNEL if known is None or DEFAULT_KERNEL in known else known[0]
    return values.choice("kernel", default if raw == "auto" else raw, KERNEL_FACTS)


def _checkpointing(raw: Any, device: str) -> bool:
    """On a GPU memory runs out first: without checkpointing a 4B model keeps 6 MB a token."""
    return device == "cuda" if raw == AUTO else values.flag("checkpointing", raw)


def _engine(raw: Raw, strategy: str, trainer: str) -> EngineConfig:
    name = raw["engine"]["name"]
    if name == AUTO:
        is_offloaded = values.flag("offload.optimizer", raw["offload"]["optimizer"])
        name = default_engine(strategy, trainer, offloads_optimizer=is_offloaded)
    leaf = values.choice("engine.leaf", raw["engine"]["leaf"], LEAVES)
    return EngineConfig(name=values.choice("engine", name, ENGINE_FACTS), leaf=leaf)


def default_engine(strategy: str, trainer: str, *, offloads_optimizer: bool) -> str:
    """Return the engine of a request that leaves it open; a sweep then gives all its cells the same one.

    Training stacks take STACK_ENGINE; of the strategies that they drive, only torch_cp does not run under it.
    """
    if offloads_optimizer:
        return next(name for name, facts in ENGINE_FACTS.items() if facts.offloads_optimizer)
    drives = TRAINER_FACTS[trainer].drives
    takes_stacks = drives is not None and STACK_ENGINE in drives.get(strategy, [STACK_ENGINE])
    return STACK_ENGINE if takes_stacks else DEFAULT_ENGINE


def _optimizer(raw: Raw) -> OptimizerConfig:
    return values.section(
        "optimizer",
        raw,
        OptimizerConfig,
        name=values.choice("optimizer", raw["name"], OPTIMIZER_FACTS),
        schedule=values.choice("optimizer.schedule", raw["schedule"], SCHEDULES),
    )


def _loss(raw: Any, trainer: str) -> str:
    """In chunks where the loss is ours; a training stack of somebody else computes its own."""
    if raw == AUTO:
        return UNTILED if TRAINER_FACTS[trainer].is_stack else LOSSES[0]
    return values.choice("loss", raw, LOSSES)


def _data(raw: Raw, vocab_size: int) -> DataConfig:
    name = values.choice("data", raw["name"], DATA)
    path, tokenizer = (
        None if raw[key] is None else values.path(f"data.{key}", raw[key]) for key in ("path", "tokenizer")
    )
    if name == "text" and (path or tokenizer) is not None:
        text = beginning(path)
        if tokenizer is not None:
            refuse_tokenizer(tokenizer, text, vocab_size)
    prompt = values.whole("data.prompt_tokens", raw["prompt_tokens"], least=0)
    packing = values.choice("data.packing", raw.get("packing", NOT_USED), PACKING)
    return DataConfig(name=name, path=path, tokenizer=tokenizer, prompt_tokens=prompt, packing=packing)


def _hardware(raw: Raw, machine: Machine, where: Placement, mode: str) -> str:
    """Return the choice of conf/hardware/ that the ranks run on, or that a prediction is about."""
    here = this_hardware(machine, where.device)
    if mode == REPLAY and raw["name"] not in (AUTO, here):
        raise ConfigError(
            f"hardware={shown(raw['name'])}: mode=replay runs a rank on this machine, hardware={here}; leave"
            " hardware out, or take mode=predict"
        )
    if raw["name"] == AUTO:
        return here
    refuse_changed(raw)
    name = values.choice("hardware", raw["name"], options("hardware"))
    # Nodes are other machines, and a GPU without a file may be named.
    if mode == "measure" and where.name not in GATHERED and here not in (name, UNKNOWN_HARDWARE):
        raise ConfigError(
            f"hardware={name}: this machine has no such device, ranks run on hardware={here}; add"
            " mode=predict, or leave hardware out"
        )
    return name
