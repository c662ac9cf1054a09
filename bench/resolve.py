"""From the user's words to a RunConfig: every value read once, every `auto` filled in, every rule checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bench import words
from bench.config import (
    ClusterConfig,
    ConfigError,
    DataConfig,
    MeasureConfig,
    ModelConfig,
    RunConfig,
)
from bench.environment import REPOSITORY, Machine
from bench.strategies import STRATEGIES
from bench.strategies.facts import DTYPE_BYTES

CONF = REPOSITORY / "conf"
ENGINES = ("ddp", "fsdp2", "zero3")
KERNELS = ("math", "torch_flash", "flash_attn_2")
LOSSES = ("chunked", "untiled")
FAMILIES = ("qwen3", "qwen2", "llama")
ENV_ALLOWED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_",
)
CPU_RANKS = 2
MIN_GPUS_FOR_4B = 4

Raw = Mapping[str, Any]


def _names(section: type[Any]) -> list[str]:
    return [field.name for field in fields(section)]


KNOWN_KEYS: Mapping[str, list[str]] = {
    "": [*_names(RunConfig), "resume", "sweep_dir"],
    "strategy": ["name"],
    "model": _names(ModelConfig),
    "engine": ["name"],
    "trainer": ["name"],
    "workload": ["name"],
    "data": _names(DataConfig),
    "cluster": _names(ClusterConfig),
    "measure": _names(MeasureConfig),
    "experiment": ["name"],
}


def plain(composed: DictConfig) -> Raw:
    """A configuration that Hydra composed, as plain values without Hydra's own part."""
    content = OmegaConf.to_container(
        OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]), resolve=True
    )
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def resolve(raw: Raw, machine: Machine) -> RunConfig:
    """One cell from a composed configuration; raises ConfigError at the first value that is no good."""
    _refuse_unknown(raw)
    strategy = words.choice("strategy", raw["strategy"]["name"], STRATEGIES)
    seq_len = words.tokens("seq_len", raw["seq_len"])
    cluster = _cluster(raw["cluster"], machine)
    degrees = _degrees(raw, strategy, cluster["world_size"])
    world_size = cluster["world_size"]
    if not STRATEGIES[strategy].shares_sequences:
        world_size = degrees["dp_replicate"] * degrees["dp_shard"]
    device = cluster["device"]
    return RunConfig(
        seq_len=seq_len,
        batch=words.whole("batch", raw["batch"]),
        grad_accum=words.whole("grad_accum", raw["grad_accum"]),
        strategy=strategy,
        layout=_layout(raw["layout"], strategy),
        kernel=_kernel(raw["kernel"]),
        dtype=words.choice("dtype", raw["dtype"], DTYPE_BYTES),
        model=_model(raw["model"], machine if device == "cuda" else None),
        engine=words.choice("engine", raw["engine"]["name"], ENGINES),
        trainer=words.choice("trainer", raw["trainer"]["name"], ("native",)),
        workload=words.choice("workload", raw["workload"]["name"], ("train",)),
        data=_data(raw["data"], seq_len),
        mode=words.choice("mode", raw["mode"], ("measure",)),
        hardware=_hardware(raw["hardware"], machine, device),
        cluster=ClusterConfig(
            name=cluster["name"],
            world_size=world_size,
            device=device,
            backend=cluster["backend"],
            threads_per_rank=_threads(raw["cluster"], machine, world_size),
        ),
        **degrees,
        checkpointing=words.flag("checkpointing", raw["checkpointing"]),
        loss=words.choice("loss", raw["loss"], LOSSES),
        measure=_measure(raw["measure"]),
        seed=words.whole("seed", raw["seed"], least=0),
        env=_env(raw["env"]),
        experiment=raw["experiment"]["name"],
    )


def _refuse_unknown(raw: Raw) -> None:
    """Hydra lets `+key=value` add anything; a key that nobody reads would be silently without effect."""
    for path, known in KNOWN_KEYS.items():
        section = raw if path == "" else raw[path]
        for key in section:
            if key not in known:
                name = f"{path}.{key}" if path else key
                raise ConfigError(f"{name}: {words.no_such_key(name, all_keys())}")


def all_keys() -> list[str]:
    """Every key of the command line, with its group in front."""
    return [f"{path}.{key}" if path else key for path, keys in KNOWN_KEYS.items() for key in keys]


def _cluster(raw: Raw, machine: Machine) -> dict[str, Any]:
    device = raw["device"]
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    words.choice("cluster.device", device, ("cpu", "cuda"))
    if device == "cuda" and not machine.gpus:
        raise ConfigError(
            f"cluster={raw['name']}: no GPU is visible here; take cluster=cpu, or check CUDA_VISIBLE_DEVICES"
        )
    backend = raw["backend"]
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    words.choice("cluster.backend", backend, ("nccl", "gloo"))
    if (backend == "nccl") != (device == "cuda"):
        raise ConfigError(
            f"cluster.backend={backend}: goes with {'GPUs' if backend == 'nccl' else 'CPU ranks'}, and"
            f" cluster.device={device}; leave cluster.backend=auto"
        )
    world_size = raw["world_size"]
    if world_size == "auto":
        world_size = len(machine.gpus) if device == "cuda" else CPU_RANKS
    world_size = words.whole("cluster.world_size", world_size)
    if device == "cuda" and world_size > len(machine.gpus):
        raise ConfigError(
            f"cluster.world_size={world_size}: {len(machine.gpus)} GPUs are visible;"
            f" write cluster.world_size={len(machine.gpus)}"
        )
    name = ("gpu" if device == "cuda" else "cpu") if raw["name"] == "auto" else raw["name"]
    return {"name": name, "device": device, "backend": backend, "world_size": world_size}


def _degrees(raw: Raw, strategy: str, world_size: int) -> dict[str, int]:
    """sp_degree, dp_replicate and dp_shard: their product is the number of ranks.

    Without shared sequences a cell is one rank unless data parallelism is asked for, whatever sp_degree
    and the cluster's size are swept over.
    """
    replicate = words.whole("dp_replicate", raw["dp_replicate"])
    shard, sp_degree = raw["dp_shard"], raw["sp_degree"]
    if not STRATEGIES[strategy].shares_sequences:
        if sp_degree != "auto":
            words.whole("sp_degree", sp_degree)
        shard = 1 if shard == "auto" else words.whole("dp_shard", shard)
        _check_ranks(replicate * shard, world_size, raw["cluster"]["world_size"])
        return {"sp_degree": 1, "dp_replicate": replicate, "dp_shard": shard}
    taken = replicate
    if sp_degree != "auto":
        sp_degree = words.whole("sp_degree", sp_degree)
        taken *= sp_degree
    if shard != "auto":
        shard = words.whole("dp_shard", shard)
        taken *= shard
    # Where nothing is left to fill in, legality compares the product with the number of ranks.
    left = max(1, world_size // taken)
    if sp_degree == "auto":
        return {
            "sp_degree": left,
            "dp_replicate": replicate,
            "dp_shard": 1 if shard == "auto" else shard,
        }
    return {
        "sp_degree": sp_degree,
        "dp_replicate": replicate,
        "dp_shard": left if shard == "auto" else shard,
    }


def _check_ranks(wanted: int, world_size: int, asked: Any) -> None:
    if wanted > world_size and asked != "auto":
        raise ConfigError(
            f"dp_replicate x dp_shard = {wanted} ranks, but cluster.world_size={world_size}; raise"
            f" cluster.world_size to {wanted}"
        )


def _layout(raw: Any, strategy: str) -> str:
    if raw == "auto":
        return STRATEGIES[strategy].default_layout
    return words.choice("layout", raw, ("contiguous", "zigzag", "striped"))


def _kernel(raw: Any) -> str:
    return words.choice("kernel", "torch_flash" if raw == "auto" else raw, KERNELS)


def _model(raw: Raw, gpus: Machine | None) -> ModelConfig:
    name = raw["name"]
    if name == "auto":
        raw = _yaml("model", _auto_model(gpus))
    elif name == "checkpoint":
        raw = _checkpoint(raw["path"])
    whole = {
        key: words.whole(f"model.{key}", raw[key])
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim",
        )
    }  # fmt: skip
    if whole["num_heads"] % whole["num_kv_heads"]:
        raise ConfigError(
            f"model.num_kv_heads={whole['num_kv_heads']}: must divide model.num_heads={whole['num_heads']}"
        )
    if whole["head_dim"] % 2:
        raise ConfigError(f"model.head_dim={whole['head_dim']}: must be even for rotary positions")
    return ModelConfig(
        name=raw["name"],
        family=words.choice("model.family", raw["family"], FAMILIES),
        path=raw["path"],
        tied_embeddings=words.flag("model.tied_embeddings", raw["tied_embeddings"]),
        attention_bias=words.flag("model.attention_bias", raw["attention_bias"]),
        rope_theta=float(raw["rope_theta"]),
        norm_eps=float(raw["norm_eps"]),
        **whole,
    )


def _auto_model(gpus: Machine | None) -> str:
    if gpus is None:
        return "qwen3_nano"
    return "qwen3_4b" if len(gpus.gpus) >= MIN_GPUS_FOR_4B else "qwen3_0_6b"


def _checkpoint(path: Any) -> dict[str, Any]:
    """The numbers of a local checkpoint's config.json, in our words."""
    try:
        numbers = json.loads((Path(path or "") / "config.json").read_text())
        heads = numbers["num_attention_heads"]
        return {
            "name": Path(path).resolve().name,
            "family": numbers["model_type"],
            "path": str(Path(path).resolve()),
            "vocab_size": numbers["vocab_size"],
            "hidden_size": numbers["hidden_size"],
            "intermediate_size": numbers["intermediate_size"],
            "num_layers": numbers["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": numbers.get("num_key_value_heads", heads),
            "head_dim": numbers.get("head_dim") or numbers["hidden_size"] // heads,
            "tied_embeddings": numbers.get("tie_word_embeddings", False),
            "attention_bias": numbers.get("attention_bias", False),
            "rope_theta": (numbers.get("rope_parameters") or numbers).get("rope_theta", 1e4),
            "norm_eps": numbers.get("rms_norm_eps", 1e-6),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.path={path}: no checkpoint folder with a config.json ({error}); name a local folder of"
            " a Qwen3, Qwen2 or Llama model"
        ) from None


def _data(raw: Raw, seq_len: int) -> DataConfig:
    name = words.choice("data", raw["name"], ("text", "synthetic"))
    for key in ("path", "tokenizer"):
        if raw[key] is not None and not Path(str(raw[key])).exists():
            raise ConfigError(f"data.{key}={raw[key]}: no such file or folder; check the path")
    prompt = words.whole("data.prompt_tokens", raw["prompt_tokens"], least=0)
    if prompt >= seq_len:
        raise ConfigError(
            f"data.prompt_tokens={prompt}: leaves no token of seq_len={seq_len} to train on; stay below it"
        )
    return DataConfig(name=name, path=raw["path"], tokenizer=raw["tokenizer"], prompt_tokens=prompt)


def _hardware(raw: Raw, machine: Machine, device: str) -> str:
    if raw["name"] != "auto":
        return str(raw["name"])
    if device == "cpu":
        return "cpu"
    known = [_yaml("hardware", path.stem) for path in sorted((CONF / "hardware").glob("*.yaml"))]
    fits = (h["name"] for h in known if h.get("matches") and h["matches"] in machine.gpus[0])
    return str(next(fits, "unknown"))


def _threads(raw: Raw, machine: Machine, world_size: int) -> int:
    if raw["threads_per_rank"] == "auto":
        return max(1, machine.cores // world_size)
    return words.whole("cluster.threads_per_rank", raw["threads_per_rank"])


def _measure(raw: Raw) -> MeasureConfig:
    return MeasureConfig(
        steps=words.whole("measure.steps", raw["steps"]),
        warmup_steps=words.whole("measure.warmup_steps", raw["warmup_steps"], least=0),
        budget_s=words.seconds("measure.budget_s", raw["budget_s"]),
        repeats=words.whole("measure.repeats", raw["repeats"]),
        timeout_s=words.seconds("measure.timeout_s", raw["timeout_s"]),
        trace=words.flag("measure.trace", raw["trace"]),
        gradients=words.flag("measure.gradients", raw["gradients"]),
    )


def _env(raw: Raw) -> tuple[tuple[str, str], ...]:
    for name in raw:
        if not name.startswith(ENV_ALLOWED):
            raise ConfigError(
                f"env.{name}: only variables that change communication or allocation are an axis"
                f" ({', '.join(ENV_ALLOWED)}); set others before the command"
            )
    return tuple(sorted((name, str(value)) for name, value in raw.items()))


def _yaml(group: str, name: str) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}
