"""`auto` is filled in from the machine, and combinations become cells or refusals."""

import json
from dataclasses import replace

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.config import ConfigError
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell
from tests.support.checkpoints import shapes_of, write_weights

ALLOCATOR = "env.PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("machine", "filled_in"),
    [
        (TWO_CORES, (2, "gloo", "qwen3_nano", 2, 1, "cpu")),
        (FOUR_H100, (4, "nccl", "qwen3_4b", 4, 16, "h100_80gb")),
    ],
)
def test_auto_values_follow_from_the_machine(machine, filled_in):
    cell = make_cell(machine=machine)
    ranks = (cell.cluster.world_size, cell.cluster.backend, cell.model.name)
    assert (*ranks, cell.sp_degree, cell.cluster.threads_per_rank, cell.hardware) == filled_in


@pytest.mark.parametrize("sp_degree", ["1", "2", "4", "auto"])
def test_local_is_one_rank_at_any_sp_degree(sp_degree):
    cell = make_cell("strategy=local", f"sp_degree={sp_degree}", "cluster.world_size=4")
    assert (cell.sp_degree, cell.cluster.world_size, cell.cluster.threads_per_rank) == (1, 1, 2)
    assert cell.cell_id == make_cell("strategy=local").cell_id
    base = make_cell("strategy=local", "dp_shard=4", f"sp_degree={sp_degree}")
    ranks = base.cluster.world_size, base.cluster.nodes
    assert (base.sp_degree, base.dp_degree, *ranks) == (1, 4, 4, 1)


SIX_GPUS = replace(FOUR_H100, gpus=FOUR_H100.gpus[:1] * 6)
ON_4_CPU_RANKS = ("cluster.world_size=4", "engine=fsdp2")


@pytest.mark.parametrize(
    ("machine", "words", "degrees", "ranks"),
    [
        (TWO_CORES, ON_4_CPU_RANKS, (4, 1, 1), 4),
        (TWO_CORES, (*ON_4_CPU_RANKS, "dp_shard=4"), (1, 1, 4), 4),
        (TWO_CORES, (*ON_4_CPU_RANKS, "dp_replicate=2", "sp_degree=2"), (2, 2, 1), 4),
        (SIX_GPUS, ("sp_degree=2",), (2, 1, 3), 6),
        (SIX_GPUS, ("dp_shard=3",), (2, 1, 3), 6),
        (FOUR_H100, ("sp_degree=2", "dp_shard=1"), (2, 1, 1), 2),
        (FOUR_H100, ("sp_degree=8",), (8, 1, 1), 4),
    ],
)
def test_auto_degrees_use_all_ranks_and_set_ones_what_they_need(machine, words, degrees, ranks):
    cell = make_cell(*words, machine=machine)
    assert (cell.sp_degree, cell.dp_replicate, cell.dp_shard) == degrees
    assert cell.cluster.world_size == ranks
    assert (refusal(cell) is None) == (cell.sp_degree <= ranks)


@pytest.mark.parametrize("trainer", ["native", "accelerate", "transformers"])
@pytest.mark.parametrize(
    ("words", "equal"),
    [
        ("sp_degree=4 dp_replicate=2", "sp_degree=4 dp_shard=2"),
        ("dp_replicate=2 dp_shard=2", "dp_shard=4"),
        ("strategy=local dp_replicate=2", "strategy=local dp_shard=2"),
    ],
)
def test_zero3_has_one_cell_for_replicas_and_shards(trainer, words, equal):
    base = ("strategy=deepspeed_ulysses", "engine=zero3", f"trainer={trainer}", "cluster.world_size=8")
    cell, sharded = (make_cell(*base, *own.split()) for own in (words, equal))
    assert (cell.dp_replicate, cell.dp_shard) == (1, sharded.dp_shard)
    assert cell.cell_id == sharded.cell_id


def test_degrees_that_do_not_fit_are_refused_as_typed():
    cell = make_cell("engine=zero3", "sp_degree=2", "dp_replicate=2", "dp_shard=2", "cluster.world_size=4")
    assert "sp_degree=2 x dp_replicate=2 x dp_shard=2 is not" in refusal(cell)


def test_cell_id_depends_on_work_alone():
    assert make_cell("seq_len=8192").cell_id == make_cell("seq_len=8k").cell_id
    assert make_cell("measure.repeats=3").cell_id == make_cell().cell_id
    assert make_cell("seed=1").cell_id != make_cell().cell_id


def test_padding_is_the_least_that_the_layout_needs():
    padding = [make_cell("pad=true", "strategy=ring", f"seq_len={n}").padding for n in (249, 250, 252)]
    assert padding == [3, 2, 0]
    assert make_cell("pad=true", "strategy=local", "seq_len=249").padding == 0
    assert refusal(make_cell("pad=true", "strategy=ring", "seq_len=249")) is None
    assert refusal(make_cell("pad=true", "strategy=ring", "seq_len=249", "workload=attention")) is not None


ON_FLASH_ATTN = ("ring_flash_attn", "ring_flash_attn_llama3", "yunchang_ring", "yunchang_usp")


@pytest.mark.parametrize("name", ON_FLASH_ATTN)
def test_packages_on_flash_attn_take_its_dtypes(name):
    facts = STRATEGIES[name]
    assert facts.dtypes == KERNEL_FACTS["flash_attn_2"].dtypes["cuda"]
    refused = facts.refusals(make_cell(f"strategy={name}", "dtype=fp32"))
    assert refused[0] == f"dtype=fp32 is not for {name}; choose dtype=bf16 or fp16"


def test_allocator_settings_are_refused_if_ranks_ignore_them():
    value = "max_split_size_mb:512, roundup_power2_divisions:[256:1,>:4]"
    allowed = make_cell(f"++{ALLOCATOR}='{value}'", machine=FOUR_H100)
    assert allowed.env == (("PYTORCH_ALLOC_CONF", value),)
    for setting, machine, message in (
        ("backend:native", FOUR_H100, "set PYTORCH_ALLOC_CONF=backend:native before the command instead"),
        ("expandable_segments:True", TWO_CORES, "ranks run on the CPU"),
        ("nonsense", FOUR_H100, "must be settings with values; write env.PYTORCH_ALLOC_CONF="),
    ):
        with pytest.raises(ConfigError, match=message):
            make_cell(f"++{ALLOCATOR}={setting}", machine=machine)


def test_default_budgets_are_larger_on_a_gpu_than_on_a_cpu():
    cpu, gpu = make_cell().measure, make_cell(machine=FOUR_H100).measure
    assert (cpu.budget_s, cpu.warmup_s, cpu.min_timed_steps) == (20, 0, 0)
    assert (gpu.budget_s, gpu.warmup_s, gpu.min_timed_steps) == (30, 10, 3)
    words = ("measure.budget_s=5", "measure.warmup_s=0", "measure.min_timed_steps=2")
    for machine in (TWO_CORES, FOUR_H100):
        own = make_cell(*words, machine=machine).measure
        assert (own.budget_s, own.warmup_s, own.min_timed_steps) == (5, 0, 2)


NANO = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4,
}  # fmt: skip
CHECKPOINTS = {
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 128},
        "a qwen3_moe has experts",
    ),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "its weights are quantized; name a folder",
    ),
    "quantized by an old key": (
        {"compression_config": {"format": "pack-quantized"}},
        "its weights are quantized; name a folder",
    ),
    "quantized for images": (
        {"model_type": "llava", "text_config": {**NANO}, "quantization_config": {"bits": 4}},
        "its weights are quantized; name a folder",
    ),
    "no safetensors": ({}, "contains no .safetensors file; write one"),
    "another layer": (
        {"per_layer_config": {"1": {"num_key_value_heads": 1}}},
        "layers differ from one another",
    ),
    "dropout of scores": (
        {"attention_dropout": 0.1},
        "attention_dropout=0.1, but no strategy drops scores; write 0",
    ),
    "another family inside": (
        {"model_type": "llava", "text_config": {"model_type": "gemma2"}},
        "is a gemma2, a family that cells cannot build; name a folder of one of qwen3, qwen2,",
    ),
    "another family": (
        {"model_type": "phi3", "sliding_window": 262144},
        "is a phi3, .*; name a folder of one of qwen3, qwen2, llama, mistral,",
    ),
    "a family of nobody": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
        "is a mine, a family that cells cannot build; name a folder of one of qwen3, qwen2,",
    ),
    "a text for a number": (
        {"hidden_size": "64"},
        r"transformers cannot read its config.json \(Field 'hidden_size' expected int, got str",
    ),
    "another rotation": (
        {"rope_scaling": {"type": "su", "long_factor": [1.0]}},
        "rope_type=su is not computed by transformers for a llama; name a folder with plain RoPE or one",
    ),
    "a number that is none": (
        {"num_hidden_layers": 0},
        "by its config.json model.num_layers=0: must be .*; correct it there, or name another folder$",
    ),
}


def checkpoint(folder, numbers, *, weights=True):
    (folder / "config.json").write_text(json.dumps({**NANO, **numbers}))
    if weights:
        write_weights(folder / "model.safetensors", shapes_of(NANO))
    return "model=checkpoint", f"model.path={folder}"


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_untrainable_checkpoint_is_refused(tmp_path, case):
    numbers, message = CHECKPOINTS[case]
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: {message}") as refused:
        make_cell(*checkpoint(tmp_path, numbers, weights=case != "no safetensors"))
    assert "\n" not in str(refused.value)
    assert "model.family" not in str(refused.value)


def test_window_refuses_only_longer_sequences(tmp_path):
    words = checkpoint(tmp_path, {"model_type": "mistral", "sliding_window": 512})
    assert refusal(make_cell(*words, "seq_len=512")) is None
    message = refusal(make_cell(*words, "seq_len=1k"))
    assert "sliding_window=512, less than seq_len=1024" in message
    assert message.endswith("take seq_len=512 or less")


def test_multimodal_checkpoint_is_read_as_its_text_model(tmp_path):
    """The numbers may be in a section or, as in older Qwen2.5-VL files, at the top level."""
    inside = {"model_type": "llava", "text_config": {**NANO, "model_type": "mistral", "sliding_window": None}}
    assert make_cell(*checkpoint(tmp_path, inside)).model.family == "mistral"
    tied = {**inside, "tie_word_embeddings": True}
    tied["text_config"] = {**inside["text_config"], "tie_word_embeddings": False}
    assert make_cell(*checkpoint(tmp_path, tied)).model.tied_embeddings
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    top_level = {"model_type": "qwen2_5_vl", "rope_scaling": rope}
    words = checkpoint(tmp_path, top_level)
    write_weights(tmp_path / "model.safetensors", shapes_of({**NANO, "model_type": "qwen2"}))
    assert make_cell(*words).model.family == "qwen2"


def test_network_name_distinguishes_cells_on_several_nodes():
    words = ("cluster=nodes", "cluster.nodes=2")
    unnamed, named, other = (
        make_cell(*words, *more) for more in ((), ("cluster.network=1gbit",), ("cluster.network=100",))
    )
    assert [cell.cluster.network for cell in (unnamed, named, other)] == [None, "1gbit", "100"]
    assert len({cell.cell_id for cell in (unnamed, named, other)}) == 3
    on_one = make_cell(*words, "cluster.network=1gbit", "strategy=local")
    assert (on_one.cluster.nodes, on_one.cluster.network) == (1, None)
    with pytest.raises(ConfigError, match=r"cluster\.network=1gbit: .* cluster\.nodes=1; leave it out"):
        make_cell("cluster.network=1gbit")
