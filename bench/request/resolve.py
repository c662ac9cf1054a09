"""Conversion of a composed configuration into a Cell: reads and checks values, and fills in every `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.common.environment import Machine
from bench.common.labels import value_label
from bench.config import (
    AUTO,
    DTYPE_BYTES,
    ENGINE_LEAVES,
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
    QualityConfig,
    ReplayConfig,
    WorkloadConfig,
)
from bench.measure.workloads import WORKLOADS
from bench.request import values
from bench.request.choices import Raw, options
from bench.request.device_sections import env_pairs, measure_config
from bench.request.hardware import hardware_of_machine, refuse_changed_numbers
from bench.request.kernel_choice import kernel_choice
from bench.request.model_numbers import model_config
from bench.request.modes import MEASURE, MODE_NAMES, PREDICT, REPLAY, target_machine, with_replayed_rank
from bench.request.placement import (
    MULTI_NODE_CLUSTERS,
    Placement,
    degrees,
    memory_limit_gib,
    place,
    refuse_no_allocation,
    shrink_cluster,
    threads_per_rank,
    unshared_degrees,
    used_ranks,
)
from bench.strategies import STRATEGIES
from bench.strategies.options import Flag, Option, WholeNumber, default_text, flag_text, yaml_default
from bench.training.chunks import PACKAGE as CHUNK_PACKAGE
from bench.training.engines import DEFAULT_ENGINE, ENGINE_FACTS
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.questions import Encoder
from bench.training.tasks import SENTENCES, TaskGenerator
from bench.training.text import read_beginning
from bench.training.tokenizer import check_tokenizer
from bench.training.trainer_facts import STACK_ENGINE, TRAINER_FACTS, UNTILED

DATA, LOSSES = ("text", "synthetic", "tasks"), ("chunked", "untiled")
"""Names of data sources and losses, repeated here because the modules that define them import torch."""
CHECKED_QUESTIONS = 20
"""Number of generated questions that are checked to fit into a sequence, some of each task."""
AGENT_KEYS = ("hosts", "interface", "start")
"""Keys of `cluster` for the connection to processes on other nodes, which are not part of a cell."""
DERIVED_FIELDS = ("options", "padding", "inject_fault", "rank_order", "backend")
"""Fields of a cell and its sections that no key sets, because they follow from others or an experiment."""
SWEEP_KEYS = ("lease", "plan", "resume", "sweep_dir")
"""Keys that apply to a whole sweep and are not part of a cell."""


def _field_names(section: type[Any]) -> list[str]:
    return [field.name for field in fields(section) if field.name not in DERIVED_FIELDS]


KNOWN_KEYS: Mapping[str, list[str]] = {
    "": [*_field_names(Cell), "length_step", "pad", *SWEEP_KEYS],
    "model": _field_names(ModelConfig),
    "engine": _field_names(EngineConfig),
    "optimizer": _field_names(OptimizerConfig),
    "trainer": ["name"],
    "workload": _field_names(WorkloadConfig),
    "data": _field_names(DataConfig),
    "cluster": [*_field_names(ClusterConfig), *AGENT_KEYS],
    "measure": _field_names(MeasureConfig),
    "offload": _field_names(OffloadConfig),
    "replay": _field_names(ReplayConfig),
    "quality": _field_names(QualityConfig),
    "experiment": ["name"],
}
"""Keys of a configuration by section; "" has the top-level keys."""


def strategy_keys() -> list[str]:
    """Return the keys of `strategy`: its name, and the options of every strategy."""
    return ["name", *sorted({key for facts in STRATEGIES.usable() for key in facts.options})]


def resolve(raw: Raw, machine: Machine) -> Cell:
    """Return the cell of a composed configuration; raise ConfigError at the first invalid value."""
    if raw["mode"] != MEASURE:
        machine = target_machine(raw, machine)
    cell, pads = _read_cell(raw, machine), values.flag("pad", raw["pad"])
    if cell.mode == PREDICT:  # a prediction needs neither repeats nor a reference
        once = cell.measure if cell.measure.repeats == AUTO else replace(cell.measure, repeats=1)
        cell = replace(cell, measure=replace(once, reference_budget_s=0.0))
    if not cell.workload.trains:
        cell = _attention_cell(cell)
    elif pads:
        cell = _add_padding(cell)
    fills_cluster = cell.dp_degree * cell.sp_degree == cell.cluster.world_size
    if fills_cluster and cell.workload.trains and ENGINE_FACTS[cell.engine.name].shards_over_all_ranks:
        cell = replace(cell, dp_replicate=1, dp_shard=cell.dp_degree)
    rank = raw["replay"]["rank"]
    return cell if cell.mode != REPLAY and rank == AUTO else with_replayed_rank(cell, rank)


def _add_padding(cell: Cell) -> Cell:
    """Return the cell with the padding that its layout needs; unchanged if its degrees are not legal."""
    with STRATEGIES.name_plugin_in_errors(cell.strategy):
        facts = STRATEGIES[cell.strategy]
        if facts.degree_refusals(cell):
            return cell
        return replace(cell, padding=-cell.seq_len % facts.length_multiple(cell))


def _attention_cell(cell: Cell) -> Cell:
    """Return the cell of one layer's attention, with fixed values for settings that only training reads."""
    return replace(
        cell,
        model=replace(cell.model, num_layers=1, path=None, rope_scaling=NOT_USED, rope_factor=None),
        engine=EngineConfig(name=NOT_USED),
        optimizer=OptimizerConfig(name=NOT_USED),
        trainer=NOT_USED,
        grad_accum=1,
        checkpointing=False,
        tiled_mlp=False,
        offload=OffloadConfig(),
        measure=replace(cell.measure, weights=False),
    )


def _read_cell(raw: Raw, machine: Machine) -> Cell:
    """Return the requested cell before `resolve` changes it for its mode, its workload and padding."""
    refuse_unknown_keys(raw)
    strategy = values.choice("strategy", raw["strategy"]["name"], STRATEGIES)
    trainer = values.choice("trainer", raw["trainer"]["name"], TRAINER_FACTS)
    seq_len = values.tokens("seq_len", raw["seq_len"])
    placement = place(raw["cluster"], machine)
    if placement.name == "slurm" and raw["mode"] == MEASURE:
        refuse_no_allocation()
    if STRATEGIES[strategy].shares_sequences:
        parallel = degrees(raw, placement)
        ranks = used_ranks(placement, parallel)
    else:
        parallel = unshared_degrees(raw, placement, machine)
        ranks = parallel.product
    gpus, needs_weights = len(machine.gpus) if placement.device == "cuda" else 0, raw["mode"] != PREDICT
    model = model_config(raw["model"], gpus, seq_len, needs_weights=needs_weights)
    cell = Cell(
        seq_len=seq_len,
        batch=values.whole_number("batch", raw["batch"]),
        grad_accum=values.whole_number("grad_accum", raw["grad_accum"]),
        strategy=strategy,
        options=(),  # replaced below, with layout and kernel: their defaults depend on other fields
        layout=AUTO,
        kernel=values.choice("kernel", raw["kernel"], (AUTO, *KERNEL_FACTS)),
        dtype=values.choice("dtype", raw["dtype"], DTYPE_BYTES),
        model=model,
        engine=_engine(raw, strategy, trainer),
        optimizer=_optimizer(raw["optimizer"]),
        trainer=trainer,
        workload=WorkloadConfig(
            name=values.choice("workload", raw["workload"]["name"], WORKLOADS),
            mask=values.choice("workload.mask", raw["workload"].get("mask", "causal"), MASKS),
        ),
        data=_data(raw["data"], model.vocab_size, seq_len),
        mode=values.choice("mode", raw["mode"], MODE_NAMES),
        hardware=_hardware(raw["hardware"], machine, placement, raw["mode"]),
        cluster=_cluster(raw["cluster"], placement, machine, ranks),
        sp_degree=parallel.sp_degree,
        ulysses_degree=_ulysses_degree(raw, parallel.sp_degree, model),
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        checkpointing=_checkpointing(raw["checkpointing"], placement.device),
        loss=_loss(raw["loss"], trainer),
        tiled_mlp=values.flag("tiled_mlp", raw["tiled_mlp"]),
        offload=values.section("offload", raw["offload"], OffloadConfig),
        quality=_quality(raw["quality"]),
        measure=measure_config(raw["measure"], placement.device),
        seed=values.whole_number("seed", raw["seed"], least=0),
        env=() if raw["env"] == {} else env_pairs(raw["env"], placement.device),
        experiment=values.choice("experiment", raw["experiment"]["name"], options("experiment")),
    )
    if cell.kernel == AUTO:
        kernel, kernels = kernel_choice(cell, machine)[0], STRATEGIES[strategy].kernels
        cell = replace(cell, kernel=kernel if kernels is None or kernel in kernels else kernels[0])
    chosen_options = _strategy_options(raw["strategy"], cell)
    layout = _layout(raw["layout"], strategy, dict(chosen_options))
    return replace(cell, options=chosen_options, layout=layout)


def _cluster(raw: Raw, placement: Placement, machine: Machine, ranks: int) -> ClusterConfig:
    """Return the section `cluster` of a cell that uses `ranks` of the ranks of its placement.

    With fewer ranks than the placement has, the cell gets only the nodes that these ranks need.
    """
    binding, limit = raw["numa_binding"], raw["memory_limit_gib"]
    whole = ClusterConfig(
        name=placement.name,
        world_size=placement.world_size,
        nodes=placement.nodes,
        network=None if raw["network"] is None else _network(raw["network"], placement),
        ranks_per_gpu=min(placement.ranks_per_gpu, placement.world_size),
        device=placement.device,
        backend="nccl" if placement.device == "cuda" else "gloo",
        threads_per_rank=1,  # replaced below, when the number of nodes is known
        memory_limit_gib=limit if limit is None else memory_limit_gib(limit, placement.device),
        numa_binding=binding if binding is None else _numa_binding(binding, placement.device),
    )
    cluster = whole if ranks == placement.world_size else shrink_cluster(whole, ranks)
    return replace(cluster, threads_per_rank=threads_per_rank(raw, machine, ranks // cluster.nodes))


def _numa_binding(raw: Any, device: str) -> str:
    """Return the way in which ranks are bound to CPUs near their GPU; raise ConfigError for CPU ranks."""
    if device == "cpu":
        raise ConfigError(f"cluster.numa_binding={raw}: the ranks run on the CPU, not on a GPU; leave it out")
    return values.choice("cluster.numa_binding", raw, NUMA_BINDINGS)


def _network(raw: Any, placement: Placement) -> str:
    """Return the name of the network, which may be a number; raise ConfigError for a single node."""
    label = values.text("cluster.network", raw)
    if placement.nodes == 1:
        raise ConfigError(
            f"cluster.network={label}: names the network between nodes, and cluster.nodes=1; leave it out"
        )
    return label


def refuse_unknown_keys(raw: Raw) -> None:
    """Raise ConfigError for a key that no code reads, which Hydra accepts as `+key=value`.

    `_strategy_options` checks the keys of strategies.
    """
    for path, known in KNOWN_KEYS.items():
        section = raw if path == "" else raw[path]
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{path}={value_label(section)}: must be values with their keys; write {path}.{known[0]}=..."
            )
        for key in section:
            if key not in known:
                name = f"{path}.{key}" if path else key
                raise ConfigError(f"{name}: {values.no_such_key(name, all_keys())}")


def all_keys() -> list[str]:
    """Return every key of the command line, with its section before a dot."""
    known = {**KNOWN_KEYS, "strategy": strategy_keys()}
    return [f"{path}.{key}" if path else key for path, keys in known.items() for key in keys]


def _ulysses_degree(raw: Raw, sp_degree: int, model: ModelConfig) -> int:
    if raw["ulysses_degree"] == "auto":
        strategy = raw["strategy"]["name"]
        with STRATEGIES.name_plugin_in_errors(strategy):
            return STRATEGIES[strategy].ulysses_degree(sp_degree, model)
    return values.whole_number("ulysses_degree", raw["ulysses_degree"])


def _strategy_options(raw: Raw, cell: Cell) -> tuple[tuple[str, str], ...]:
    known = STRATEGIES[raw["name"]].options
    for key in raw:
        if key not in ("name", *known):
            near = values.nearest(key, known)
            way_out = f"did you mean strategy.{near}?" if near else "leave it out"
            raise ConfigError(f"strategy.{key}: strategy={raw['name']} has no such option; {way_out}")
    with STRATEGIES.name_plugin_in_errors(raw["name"]):
        return tuple((key, _strategy_option(key, raw[key], option, cell)) for key, option in known.items())


def _strategy_option(key: str, value: Any, option: Option, cell: Cell) -> str:
    """Return an option of a strategy as the text that a cell stores."""
    name = f"strategy.{key}"
    if value == AUTO and yaml_default(option) == AUTO:
        return default_text(option, cell)
    if isinstance(option, Flag):
        return flag_text(values.flag(name, value))
    if isinstance(option, WholeNumber):
        return str(values.whole_number(name, value, least=option.least))
    return values.choice(name, value, option)


def _layout(raw: Any, strategy: str, options: Mapping[str, str]) -> str:
    if raw == "auto":
        return STRATEGIES[strategy].layouts_with(options)[0]
    return values.choice("layout", raw, LAYOUTS)


def _checkpointing(raw: Any, device: str) -> bool:
    """Return whether layers are checkpointed; `auto` means true on GPUs, where memory limits the length.

    Without checkpointing a model of 4 billion weights keeps 6 MB per token until the backward pass.
    """
    return device == "cuda" if raw == AUTO else values.flag("checkpointing", raw)


def _engine(raw: Raw, strategy: str, trainer: str) -> EngineConfig:
    name = raw["engine"]["name"]
    if name == AUTO:
        is_offloaded = values.flag("offload.optimizer", raw["offload"]["optimizer"])
        name = default_engine(strategy, trainer, offloads_optimizer=is_offloaded)
    leaf = values.choice("engine.leaf", raw["engine"]["leaf"], ENGINE_LEAVES)
    return EngineConfig(name=values.choice("engine", name, ENGINE_FACTS), leaf=leaf)


def default_engine(strategy: str, trainer: str, *, offloads_optimizer: bool) -> str:
    """Return the engine of one cell with `engine=auto`.

    `bench.request.open_choices.with_one_engine` may replace it, so that all cells of a sweep have one engine.
    A training stack (a trainer that is not ours) takes STACK_ENGINE if the strategy runs under it there.
    """
    if offloads_optimizer:
        return next(name for name, facts in ENGINE_FACTS.items() if facts.offloads_optimizer)
    engines = TRAINER_FACTS[trainer].engines_by_strategy  # None for our own trainer
    uses_stack_engine = engines is not None and STACK_ENGINE in engines.get(strategy, [STACK_ENGINE])
    return STACK_ENGINE if uses_stack_engine else DEFAULT_ENGINE


def _optimizer(raw: Raw) -> OptimizerConfig:
    return values.section(
        "optimizer",
        raw,
        OptimizerConfig,
        name=values.choice("optimizer", raw["name"], OPTIMIZER_FACTS),
        schedule=values.choice("optimizer.schedule", raw["schedule"], SCHEDULES),
    )


def _loss(raw: Any, trainer: str) -> str:
    """Return the loss; `auto` is `chunked`, or `untiled` under a training stack, which has its own loss."""
    if raw == AUTO:
        return UNTILED if TRAINER_FACTS[trainer].is_stack else LOSSES[0]
    return values.choice("loss", raw, LOSSES)


def _data(raw: Raw, vocab_size: int, seq_len: int) -> DataConfig:
    name = values.choice("data", raw["name"], DATA)
    path, tokenizer = (
        None if raw[key] is None else values.path(f"data.{key}", raw[key]) for key in ("path", "tokenizer")
    )
    if name == "text" and (path or tokenizer) is not None:
        text = read_beginning(path, tokenizer)
        if tokenizer is not None:
            check_tokenizer(tokenizer, text, vocab_size)
    prompt = values.whole_number("data.prompt_tokens", raw["prompt_tokens"], least=0)
    packing = values.choice("data.packing", raw.get("packing", NOT_USED), PACKING)
    data = DataConfig(name=name, path=path, tokenizer=tokenizer, prompt_tokens=prompt, packing=packing)
    if name == "tasks":
        _refuse_unfit_tasks(data, vocab_size, seq_len)
    return data


def _refuse_unfit_tasks(data: DataConfig, vocab_size: int, seq_len: int) -> None:
    """Raise ConfigError for data that generated questions do not have, or if they do not fit."""
    for key, value in (("path", data.path), ("packing", data.packs), ("prompt_tokens", data.prompt_tokens)):
        if value:
            raise ConfigError(f"data.{key}: data=tasks generates its questions and has none; leave it out")
    if data.tokenizer is not None:
        check_tokenizer(data.tokenizer, SENTENCES.pair, vocab_size)
    generator = TaskGenerator(Encoder(data.tokenizer, vocab_size), seed=0)
    for number in range(CHECKED_QUESTIONS):
        generator.training_question(number, seq_len + 1)


def _quality(raw: Raw) -> QualityConfig:
    quality = values.section("quality", raw, QualityConfig)
    if quality.chunks and find_spec(CHUNK_PACKAGE) is None:
        raise ConfigError(
            f"quality.chunks={quality.chunks}: needs the package {CHUNK_PACKAGE}; install it with:"
            f" pip install {CHUNK_PACKAGE}"
        )
    return quality


def _hardware(raw: Raw, machine: Machine, placement: Placement, mode: str) -> str:
    """Return the name in conf/hardware/ of the device that ranks run on, or that a prediction assumes.

    Raises ConfigError for the name of a device other than this machine's, unless the cell is predicted.
    """
    here = hardware_of_machine(machine, placement.device)
    if mode == REPLAY and raw["name"] not in (AUTO, here):
        raise ConfigError(
            f"hardware={value_label(raw['name'])}: mode=replay runs a rank on this machine, hardware={here};"
            " leave hardware out, plan it with --plan, or take mode=predict"
        )
    if raw["name"] == AUTO:
        return here
    refuse_changed_numbers(raw)
    name = values.choice("hardware", raw["name"], options("hardware"))
    # Nodes may have other devices, and the user may name a file for a GPU that has none.
    if (
        mode == "measure"
        and placement.name not in MULTI_NODE_CLUSTERS
        and here not in (name, UNKNOWN_HARDWARE)
    ):
        raise ConfigError(
            f"hardware={name}: this machine has no such device, and ranks run on hardware={here}; add"
            " mode=predict, or leave hardware out"
        )
    return name
