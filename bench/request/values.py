"""Conversion of single values from the command line or YAML into typed values.

The functions raise ConfigError for an invalid value, whose message begins with their argument `key`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from bench.common.labels import LENGTH_UNITS, value_label
from bench.config import MAX_WHOLE, ConfigError, Flag, Resume, positive_rule, whole_rule

MAX_CELLS = 10_000
"""Largest number of cells of a sweep, repeats included."""
SYNONYMS: Mapping[str, Collection[str]] = {
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half"),
    "fp32": ("float32", "float"),
    "fp64": ("float64", "double"),
    "cuda": ("gpu",),
    "ring": ("ring_attention", "ringattention", "p2p"),
    "ulysses": ("ulysses_attention", "deepspeed", "a2a"),
    "gather_kv": ("all_gather", "allgather"),
    "strategy": (
        *("ring_attention", "sp_backend", "cp_backend", "sequence_parallel_backend", "cp_comm_type"),
        *("cp_mode", "ring_attn_func", "enable_ulysses", "parallelism_config_sp_backend"),
    ),
    "strategy.rotation": ("cp_comm_strategy", "parallelism_config_cp_comm_strategy"),
    "zigzag": ("zigzag_ring", "load_balanced", "headtail"),
    "deepspeed_ulysses": ("alst", "arctic"),
    "torch_cp": ("context_parallel",),
    "ring_flash_attn": ("zigzag_ring", "zigzag_ring_flash_attn", "batch_ring"),
    "ring_flash_attn_llama3": ("llama3_ring", "llama3", "varlen_llama3"),
    "usp": ("hybrid", "unified", "a2a_p2p", "a2a+p2p"),
    "torch_flash": ("sdpa",),
    "math": ("eager",),
    "flash_attn_2": ("fa2", "flash_attention_2"),
    "flash_attn_3": ("fa3", "flash_attention_3"),
    "flash_attn_4": ("fa4", "flash_attention_4"),
    "zero3": ("deepspeed", "zero", "deepspeed_zero3", "stage3"),
    "fsdp2": ("fsdp", "fsdp1", "fully_shard"),
    "transformers": ("hf", "huggingface"),
    "trl": ("sft", "sft_trainer", "sfttrainer"),
    "sweep_dir": ("output_dir", "output_folder", "save_dir"),
    "seq_len": (
        *("max_length", "max_seq_len", "max_seq_length", "context_length", "seq_length", "sequence_len"),
        *("sequence_length", "cutoff_len", "model_max_length", "block_size", "max_model_len"),
        "max_context_length",
    ),
    "sp_degree": (
        *("sp", "sp_size", "sequence_parallel_size", "sequence_parallel_degree"),
        *("cp", "cp_size", "cp_degree", "context_parallel_size", "context_parallel_degree"),
        *("ulysses_sequence_parallel_size", "ring_attn_size", "ring_degree", "parallelism_config_sp_size"),
        *("parallelism_config_cp_size", "ulysses_size", "ring_size", "sequence_parallel"),
        "ulysses_parallel_size",
    ),
    "batch": (
        "micro_batch_size",
        "per_device_train_batch_size",
        "local_batch_size",
        "micro_batch_size_per_gpu",
        "train_micro_batch_size_per_gpu",
        "num_tokens_per_microbatch_per_dp_rank",
    ),
    "grad_accum": ("gradient_accumulation_steps", "gradient_accumulation"),
    "checkpointing": (
        *("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint"),
        *("enable_gradient_checkpointing", "disable_gradient_checkpointing", "recompute_granularity"),
        *("enable_activation_checkpointing", "fsdp_activation_checkpointing", "recompute_activations"),
    ),
    "dtype": ("bf16", "fp16", "fp32", "torch_dtype", "mixed_precision", "mixed_precision_param"),
    "data.packing": ("packing", "sample_packing", "padding_free"),
    "documents": ("true",),
    "data.path": ("dataset", "dataset_name", "train_dataset", "train_files"),
    "kernel": ("attn_implementation", "attention_backend", "attn_impl", "flash_attn", "flash_attention"),
    "engine": (
        *("zero_stage", "fsdp_config", "fsdp_version", "distributed_type", "deepspeed", "fsdp"),
        *("use_torch_fsdp2", "use_megatron_fsdp", "zero_optimization", "zero_optimization.stage"),
        *("dist_config", "engine.strategy"),
    ),
    "loss": ("fused_cross_entropy",),
    "optimizer.learning_rate": ("lr", "learning_rate"),
    "dp_shard": ("data_parallel_shard_degree", "dp_shard_size", "parallelism_config_dp_shard_size"),
    "dp_replicate": (
        "data_parallel_replicate_degree",
        "dp_replicate_size",
        "parallelism_config_dp_replicate_size",
    ),
    "model": ("model_name_or_path", "base_model", "model_id"),
    "measure.min_timed_steps": ("least_steps",),
    "cluster.world_size": ("num_gpus", "num_processes", "nproc_per_node"),
    "cluster.nodes": ("nodes", "nnodes", "num_nodes", "num_machines"),
    "cluster.hosts": ("hosts", "hostfile", "host_list", "nodelist", "machines"),
}
"""Names in other tools and earlier versions, by our key or value, which an error message then suggests.

The table has only names for which the most similar spelling is missing or wrong.
"""
NOT_OFFERED: Mapping[str, Collection[str]] = {
    "files of other tools are not read; docs/coming_from.md lists our key for each of theirs": (
        *("config_file", "config", "accelerate_config", "ds_config", "deepspeed_config"),
    ),
    "conf/config.yaml is the only configuration; write its keys on the command line, as in seq_len=8k": (
        *("config_name", "config_path", "config_dir"),
    ),
    "torch.compile is not offered, the model runs eagerly in every cell; leave it out": (
        *("torch_compile", "compile", "use_torch_compile", "torch_compile_backend", "torch_compile_mode"),
    ),
    "Liger kernels are not offered; loss=chunked, the default, does not keep all logits either": (
        *("liger", "liger_kernel", "use_liger_kernel", "use_liger", "enable_liger_kernel", "loss=liger"),
    ),
    "adapters such as LoRA are not offered, all parameters are trained; observe a loop of your own that has"
    " them (docs/observe.md)": (
        *("lora", "lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_lora"),
        *("peft", "use_peft", "peft_config", "adapter", "tuner_type", "train_type", "finetuning_type"),
    ),
    "training in 8 or 4 bit is not offered; dtype=bf16 is the narrowest": (
        *("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits", "quantization_config", "fp8"),
        *("dtype=fp8", "dtype=float8", "dtype=mxfp8", "dtype=int8", "dtype=fp4", "dtype=nf4", "dtype=int4"),
    ),
    "ZeRO stages 1 and 2 are not offered; engine=zero3 shards the parameters too, ddp shards nothing": (
        *("engine=zero1", "engine=zero2", "engine=stage1", "engine=stage2"),
        *("engine=zero_1", "engine=zero_2", "engine=deepspeed_zero1", "engine=deepspeed_zero2"),
    ),
    "parameters stay on the GPU; offload.optimizer=true moves their float32 copies and the optimizer's"
    " state, and offload.activations=true the inputs of layers": (
        *(
            "offload.params",
            "offload.param",
            "offload.parameters",
            "offload_params",
            "offload_param",
            "fsdp_offload_params",
            "fsdp_cpu_offload",
        ),
    ),
    "the optimizer's state is float32, as are the weights that it updates; leave it out": (
        "optimizer.dtype",
    ),
    "sliding windows are not offered, attention is causal over the whole sequence; data.packing=documents"
    " keeps it within documents": (
        *("sliding_window", "use_sliding_window", "window_size", "attention_window"),
    ),
    "tensor, pipeline and expert parallelism are not offered; sp_degree, dp_shard and dp_replicate are": (
        *("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree", "tp_size", "tp"),
        *("tp_degree", "pp_degree", "ep_degree"),
        *("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree", "pp_size"),
        *("expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree", "ep_size", "pp"),
        *("parallelism_config_tp_size", "tensor_parallel"),
    ),
    "models with experts are not offered; model=checkpoint takes dense models of your own": (
        *("moe", "num_experts", "num_local_experts"),
    ),
    "nothing is logged or saved while a cell trains; its record and logs are in sweep_dir=FOLDER": (
        *("logging_steps", "save_steps", "save_strategy", "eval_steps", "eval_strategy", "report_to"),
    ),
    "not a key of its own: it is batch times grad_accum times the data-parallel groups; set these": (
        *("global_batch_size", "total_batch_size", "train_batch_size", "num_tokens_per_train_step"),
    ),
}
"""Keys and values of other tools that none of ours replaces, by the answer to them."""
PACKAGES: Mapping[str, str] = {"ring": "ring_flash_attn", "ulysses": "deepspeed_ulysses"}
"""Strategy that runs the published package, by our own strategy of the same kind."""
Section = TypeVar("Section")
_LENGTH = re.compile(r"([0-9]{1,80})([kKmM]?)")


def tokens(key: str, value: Any) -> int:
    """Return a length in tokens: `8192`, `8k` (8 times 1024) or `1m` (1024k)."""
    match = _LENGTH.fullmatch(_number_text(value))
    count = int(match[1]) * LENGTH_UNITS[match[2].lower()] if match else 0
    if not 1 <= count <= MAX_WHOLE:
        raise ConfigError(
            f"{key}={value_label(value)}: a length is a whole number of tokens from 1 to {MAX_WHOLE}, with k"
            f" for 1024 or m for 1048576; write for example {key}=8k{_sweep_hint(key, value, '8k,64k')}"
        )
    return count


def whole_number(key: str, value: Any, *, least: int = 1) -> int:
    """Return a whole number from `least` to MAX_WHOLE."""
    return int(convert(key, value, Annotated[int, whole_rule(least)]))


def positive(key: str, value: Any, *, example: str) -> float:
    """Return a positive, finite number; an error shows `example`."""
    return float(convert(key, value, Annotated[float, positive_rule(example)]))


def flag(key: str, value: Any) -> bool:
    """Return a Boolean value."""
    return bool(convert(key, value, Flag))


def section(name: str, raw: Mapping[str, Any], kind: Callable[..., Section], /, **converted: Any) -> Section:
    """Return a section of a cell from its requested values.

    The annotations of `kind` are the rules for values, except for those that the caller has `converted`.
    """
    rules = _rules(kind)
    others = {key: convert(f"{name}.{key}", raw[key], rules[key]) for key in rules if key not in converted}
    return kind(**converted, **others)


def convert(key: str, value: Any, rule: Any) -> Any:
    """Return a value converted by a type annotation, whose description and example a ConfigError shows."""
    try:
        return msgspec.convert(value, rule, strict=rule == Flag)  # ${oc.env:NAME} gives numbers as text
    except (msgspec.ValidationError, UnicodeEncodeError):  # text may hold a lone surrogate
        meta = _rule_meta(rule)
        example = meta.examples[0]
        raise ConfigError(
            f"{key}={value_label(value)}: must be {meta.description}; write for example {key}={example}"
            f"{_sweep_hint(key, value, f'{example},...')}"
        ) from None


@cache
def _rules(kind: Callable[..., Any]) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _rule_meta(rule: Any) -> Any:
    """Return the msgspec metadata of a rule; for `Count | Literal["auto"]` that of the first part."""
    return rule.__metadata__[0] if hasattr(rule, "__metadata__") else _rule_meta(get_args(rule)[0])


def text(key: str, value: Any) -> str:
    """Return a name or a path: one line that is not empty."""
    line = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not line.strip() or not line.isprintable():
        raise ConfigError(
            f"{key}={value_label(value)}: must be a line of text; write {key}=... or leave it out"
        )
    return line


def path(key: str, value: Any) -> str:
    """Return the path of a file or folder that exists and can be read."""
    name = text(key, value)
    try:
        mode = os.R_OK | (os.X_OK if Path(name).is_dir() else 0)
        exists, is_readable = Path(name).exists(), os.access(name, mode)
        is_endless = exists and not (Path(name).is_file() or Path(name).is_dir())
    except (OSError, ValueError):
        exists = is_readable = is_endless = False
    if not exists:
        raise ConfigError(f"{key}={value_label(name)}: no such file or folder; check the path")
    if is_endless:
        raise ConfigError(f"{key}={value_label(name)}: is a device, pipe or socket; name a file or folder")
    if not is_readable:
        raise ConfigError(
            f"{key}={value_label(name)}: cannot be read; change its permissions, or name another"
        )
    return name


def resume(key: str, value: Any) -> Resume:
    """Return the `Resume` of true, false or `any`: MATCHING, NEVER or ANY."""
    modes = {False: Resume.NEVER, True: Resume.MATCHING, Resume.ANY.value: Resume.ANY}
    if not isinstance(value, bool | str) or value not in modes:
        raise ConfigError(f"{key}={value_label(value)}: must be true, false or any; write {key}=true")
    return modes[value]


def choice(key: str, value: Any, known: Collection[str]) -> str:
    """Return the value if it is one of `known`; otherwise the error suggests the nearest of these."""
    if not isinstance(value, str) or value not in known:
        word = str(value).lower().removeprefix("torch.").rpartition("/")[2]
        word = re.sub(r"[-.]", "_", word)  # Qwen/Qwen3-4B is qwen3_4b
        if (answer := not_offered(f"{key}={word}")) is not None:
            raise ConfigError(f"{key}={value_label(value)}: {answer}")
        near = nearest(word, known)
        hint = f"did you mean {key}={near}?" if near else f"write for example {key}={min(known)}"
        if word in SYNONYMS.get(str(near), ()) and PACKAGES.get(str(near)) in known:
            package = PACKAGES[str(near)]
            hint = f"did you mean {key}={near}, or {key}={package}, which runs the published package?"
        hint += _sweep_hint(key, value, "...")
        raise ConfigError(f"{key}={value_label(value)}: must be one of {', '.join(sorted(known))}; {hint}")
    return value


def no_such_key(key: str, known: Collection[str]) -> str:
    """Return the message about an unknown key: the answer of NOT_OFFERED, or the nearest known key."""
    if (answer := not_offered(key)) is not None:
        return answer
    near = nearest(key, known)
    return f"no such key; did you mean {near}?" if near else "no such key; --help-all lists every key"


def not_offered(key: str) -> str | None:
    """Return the answer to a key, or to `key=value`, that nothing of ours replaces; None for any other."""
    names = {key, key.rpartition(".")[2]}
    return next((answer for answer, keys in NOT_OFFERED.items() if not names.isdisjoint(keys)), None)


def nearest(word: str, known: Collection[str]) -> str | None:
    """Return the known word that was probably meant by `word`; None if no known word is similar.

    A synonym of a key suggests this key even if the user wrote it in another section.
    """
    bare = word.rpartition(".")[2]
    for name, synonyms in SYNONYMS.items():
        if name in known and (bare in synonyms or word in synonyms):
            return name
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def _number_text(value: Any) -> str:
    """Return a number as text, a float without a fraction as an integer; empty for another kind of value."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""


def _sweep_hint(key: str, value: Any, several: str) -> str:
    """Return how to write several values if the value is a list; otherwise an empty text."""
    is_list = isinstance(value, list) or (isinstance(value, str) and "," in value)
    several = ",".join(map(str, value)) if isinstance(value, list) else several
    return f"; several values are written without brackets: -m {key}={several}" if is_list else ""


def refuse_too_many(factors: Sequence[int]) -> None:
    """Raise ConfigError if the product of the factors, which is a number of cells, exceeds MAX_CELLS."""
    cells = 1
    for factor in factors:
        cells *= factor
        if cells > MAX_CELLS:
            raise ConfigError(
                f"a sweep of {cells} cells or more: at most {MAX_CELLS} are allowed; sweep fewer values"
            )
