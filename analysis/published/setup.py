"""From a claim's fields to the cell that would repeat it, and what of its set-up nothing here has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.published.choices import (
    CARRIER,
    DEVICES,
    DTYPES,
    KERNELS,
    MODELS,
    NETWORK,
    PCIE,
    Words,
    first_match,
    heads,
    strategies,
)
from analysis.published.registry import Claim, Read, Registry, Setting

NODE = 8
"""GPUs of a node in every publication that says so."""
SPEEDS = (
    "a2a_share", "communication_share", "iters_per_s", "mfu", "pct_of_ideal_flash_attn", "speedup",
    "step_time_s", "tflops_per_gpu", "tokens_per_s", "tokens_per_s_per_gpu",
)  # fmt: skip
"""Metrics that what joins the GPUs decides."""
ENGINE_OF_ZERO: Mapping[str, str] = {"3": "zero3", "None": "zero3"}
STATED_ELSEWHERE: Mapping[str, str] = {"offload.optimizer": "optimizer_offload"}
"""Keys of the command line, and the field of a claim's software that says the same."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a claim that the cell beside it does not share."""

    field: str
    published: str | None
    """None where the source does not state it."""
    here: str
    """What the cell has in its place, or why there is none."""
    is_decisive: bool = True
    """Whether the numbers cannot be set beside one another for it."""

    def __str__(self) -> str:
        stated = " not stated" if self.published is None else f"={self.published}"
        return f"{self.field}{stated}: {self.here}"


@dataclass(frozen=True, slots=True)
class Setup:
    """The cell that would repeat a claim."""

    settings: Words
    """Keys of the command line; without those of `missing`."""
    alternatives: Sequence[Words]
    """Strategies that are the same method, the one in `settings` first."""
    base: Words | None
    """The cell that a ratio is taken to."""
    stated: Words | None
    """The settings as the source states them, where its own numbers speak for others."""
    differences: Sequence[Difference]

    @property
    def missing(self) -> list[Difference]:
        """Why nothing here is comparable; empty where a cell is."""
        return [each for each in self.differences if each.is_decisive]

    @property
    def assumed(self) -> list[Difference]:
        """What the cell has otherwise without being another."""
        return [each for each in self.differences if not each.is_decisive]


Part = tuple[Words, Sequence[Difference]]
"""Some settings, and what they do not share with the claim."""


def setup_of(claim: Claim, registry: Registry) -> Setup:
    """The cell of a claim, from its fields and from what its text was read as."""
    read = registry.reading(claim.id)
    settings: dict[str, Setting] = {}
    differences: list[Difference] = []
    for rule in RULES:
        words, found = rule(claim, read)
        settings |= words
        differences += found
    settings |= read.settings
    stated = _as_stated(claim, read)
    differences += [_contradiction(claim, read, key) for key in stated]
    return Setup(
        settings=settings,
        alternatives=strategies(claim.group, claim.system),
        base=_base(settings, read.baseline) if read.baseline else None,
        stated={**settings, **stated} if stated else None,
        differences=differences,
    )


def _base(settings: Words, baseline: Words) -> Words:
    """The cell that a ratio is taken to; another strategy has its own options."""
    kept = {key: value for key, value in settings.items() if not key.startswith("strategy.")}
    return {**(kept if "strategy" in baseline else settings), **baseline}


def open_questions(claim: Claim, registry: Registry) -> Iterator[Difference]:
    """Settings that decide the claim's number and that its source leaves open."""
    for each in registry.left_open(claim.id):
        yield Difference(each.field, None, each.why)
    count, link = claim.hardware.count, claim.hardware.interconnect
    if claim.metric in SPEEDS and isinstance(count, int) and not _is_named(count, link):
        yield Difference("hardware.interconnect", link, f"what joins {count} GPUs decides a speed")


def _is_named(count: int, link: str | None) -> bool:
    """Whether a source says what joins so many GPUs; of several nodes that is their network."""
    if count == 1:
        return True
    return link is not None and "assumed" not in link and (count <= NODE or NETWORK.search(link) is not None)


def _as_stated(claim: Claim, read: Read) -> Words:
    """What the source states where it was read as something else."""
    return {
        key: claim.software[field] is not None
        for key, field in STATED_ELSEWHERE.items()
        if key in read.settings and bool(claim.software.get(field)) != read.settings[key]
    }


def _contradiction(claim: Claim, read: Read, key: str) -> Difference:
    field = STATED_ELSEWHERE[key]
    value = str(read.settings[key]).lower()
    return Difference(
        f"software.{field}",
        str(claim.software[field]),
        f"{key}={value}, for {read.why[key]}",
        is_decisive=False,
    )


def _model(claim: Claim, read: Read) -> Part:
    if "model" in read.settings:
        return {}, ()
    if claim.model is None:
        return {}, [Difference("model", None, "names no model")]
    alone = heads(claim.model)
    if alone is not None:
        return {"workload": "attention", "model": CARRIER, **alone}, ()
    name = MODELS.get(claim.model)
    if name is None:
        return {}, [Difference("model", claim.model, "not in conf/model")]
    return {"model": name}, ()


def _hardware(claim: Claim, read: Read) -> Part:
    if "hardware" in read.settings:
        return {}, ()
    gpu, size = claim.hardware.gpu, claim.hardware.memory_gb
    name = DEVICES.get((gpu, size))
    if name is None and size is None and gpu in (known for known, _ in DEVICES):
        return {}, [Difference("hardware.memory_gb", None, f"which {gpu} of conf/hardware it is")]
    shown = gpu if size is None else f"{gpu} {size:g} GB"
    if name is None:
        return {}, [Difference("hardware.gpu", shown, "not in conf/hardware")]
    if "PCIe" in (claim.hardware.interconnect or ""):
        name = PCIE.get(name, name)
    assumed = (
        []
        if size
        else [Difference("hardware.memory_gb", None, f"hardware={name} assumed", is_decisive=False)]
    )
    return {"hardware": name}, assumed


def _ranks(claim: Claim, read: Read) -> Part:
    if "cluster.world_size" in read.settings:
        return {"sp_degree": claim.sp_degree or int(read.settings["cluster.world_size"])}, ()
    count = claim.hardware.count
    if not isinstance(count, int):
        return {}, [Difference("hardware.count", count, "no one number of GPUs")]
    if claim.system in ("dp-baseline", "alst-1gpu"):
        return {"cluster.world_size": count, "dp_shard": count, "sp_degree": 1}, ()
    if claim.sp_degree is None:
        return {}, [Difference("sp_degree", None, "decides what a rank holds")]
    return {"cluster.world_size": count, "sp_degree": claim.sp_degree}, ()


def _length(claim: Claim, read: Read) -> Part:
    if "seq_len" in read.settings:
        return {}, ()
    length = claim.seq_len or (int(claim.value) if claim.metric == "max_seq_len" else None)
    if length is None:
        return {}, [Difference("seq_len", None, "decides the number")]
    return {"seq_len": length}, ()


def _batch(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    stated = claim.batch or {}
    batch = stated.get("micro_batch", stated.get("local_batch", 1))
    grad_accum = stated.get("grad_accum", 1)
    words: dict[str, Setting] = {"batch": batch, "grad_accum": grad_accum}
    odd = [key for key, value in words.items() if not isinstance(value, int)]
    if odd:
        return {}, [Difference(key, str(words[key]), "no number") for key in odd]
    if "micro_batch" in stated or "local_batch" in stated:
        return words, ()
    shown = ", ".join(f"{key} {value}" for key, value in stated.items()) or None
    return words, [Difference("batch", shown, "one sequence assumed", is_decisive=False)]


def _strategy(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    known = strategies(claim.group, claim.system)
    if not known:
        return {}, [Difference("system", claim.system, "no strategy here does the same")]
    degree = claim.software.get("ulysses_degree")
    shared = {"ulysses_degree": degree} if claim.system == "usp" and isinstance(degree, int) else {}
    return {**known[0], **shared}, ()


def _dtype(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    stated = claim.software.get("dtype")
    if stated is None:
        return {"dtype": "bf16"}, [Difference("software.dtype", None, "bf16 assumed", is_decisive=False)]
    found = first_match(DTYPES, str(stated))
    if not found:
        return {}, [Difference("software.dtype", str(stated), "no such training here")]
    return {"dtype": found}, ()


def _absent(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    """Tensor and pipeline parallelism, parameters in host memory and XLA's programs are not here."""
    degrees = {key: claim.software.get(key) for key in ("tp", "pp", "mp")}
    found = [
        Difference(f"software.{key}", str(degree), "no such parallelism here")
        for key, degree in degrees.items()
        if isinstance(degree, int) and degree > 1
    ]
    offloaded, framework = claim.software.get("param_offload"), str(claim.software.get("framework"))
    if offloaded:
        found.append(Difference("software.param_offload", str(offloaded), "parameters stay on the GPU here"))
    if "JAX" in framework:
        found.append(Difference("software.framework", framework, "PyTorch only"))
    return {}, found


def _engine(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    if claim.model is not None and heads(claim.model) is not None:
        return {}, ()
    stage, framework = str(claim.software.get("zero_stage")), str(claim.software.get("framework"))
    if "FSDP" in framework:
        return {"engine": "fsdp2"}, ()
    if stage not in ENGINE_OF_ZERO:
        return {}, [Difference("software.zero_stage", stage, "only ZeRO stage 3 is here")]
    if stage == "3":
        return {"engine": "zero3"}, ()
    return {"engine": "zero3"}, [
        Difference("software.zero_stage", None, "engine=zero3 assumed", is_decisive=False)
    ]


def _savings(claim: Claim, read: Read) -> Part:
    """Checkpointing, the loss and what is offloaded, as far as the claim's software says."""
    software = claim.software
    words: dict[str, Setting] = {
        "checkpointing": True,
        "loss": "chunked" if _is_chunked(software) else "untiled",
        "tiled_mlp": bool(software.get("tiled_mlp")),
        "offload.activations": bool(software.get("activation_offload")),
        "offload.optimizer": bool(software.get("optimizer_offload")),
    }
    if claim.model is not None and heads(claim.model) is not None:
        return {}, ()
    stated = {
        "checkpointing": ("gradient_checkpointing", "activation_checkpointing"),
        "loss": ("loss", "tiled_loss", "liger"),
    }
    assumed = [
        Difference(
            f"software.{names[0]}", None, f"{key}={str(words[key]).lower()} assumed", is_decisive=False
        )
        for key, names in stated.items()
        if key not in read.settings and not any(name in software for name in names)
    ]
    return words, assumed


def _is_chunked(software: Mapping[str, Any]) -> bool:
    return any(software.get(name) not in (None, False) for name in ("tiled_loss", "liger", "loss"))


def _kernel(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    """The kernel of the prediction; a record with another one is comparable all the same."""
    stated = claim.software.get("kernel")
    found = None if stated is None else first_match(KERNELS, str(stated))
    if found is None:
        return {}, [
            Difference(
                "software.kernel",
                None if stated is None else str(stated),
                "kernel=auto assumed",
                is_decisive=False,
            )
        ]
    return {"kernel": found}, ()


def _framework(claim: Claim, read: Read) -> Part:  # noqa: ARG001
    framework = str(claim.software.get("framework"))
    compiled = re.search(r"True", str(claim.software.get("compile")))
    more = (
        [Difference("software.compile", "true", "not compiled here", is_decisive=False)] if compiled else []
    )
    return {}, [Difference("software.framework", framework, "trainer=native", is_decisive=False), *more]


RULES: Sequence[Callable[[Claim, Read], Part]] = (
    _model, _hardware, _ranks, _length, _batch, _strategy, _dtype, _absent, _engine, _savings, _kernel,
    _framework,
)  # fmt: skip
"""Each reads some fields of a claim; a later one's settings win."""
