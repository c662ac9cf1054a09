"""`auto` is filled in from the machine, and combinations become cells or refusals."""

import json
import re

import pytest

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.config import ConfigError
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from tests.cells import FOUR_H100, TWO_CORES, make_cell

ALLOCATOR = "env.PYTORCH_ALLOC_CONF"


def test_a_cpu_gets_two_gloo_ranks_and_the_nano_model():
    cell = make_cell()
    assert (cell.cluster.world_size, cell.cluster.backend, cell.model.name) == (2, "gloo", "qwen3_nano")
    assert (cell.sp_degree, cell.cluster.threads_per_rank, cell.hardware) == (2, 1, "cpu")


def test_four_h100_get_nccl_the_4b_model_and_their_datasheet():
    cell = make_cell(machine=FOUR_H100)
    assert (cell.cluster.world_size, cell.cluster.backend, cell.model.name) == (4, "nccl", "qwen3_4b")
    assert (cell.sp_degree, cell.hardware) == (4, "h100_80gb")


@pytest.mark.parametrize("sp_degree", ["1", "2", "4", "auto"])
def test_local_is_one_rank_with_all_threads_whatever_sp_degree_is_swept(sp_degree):
    cell = make_cell("strategy=local", f"sp_degree={sp_degree}", "cluster.world_size=4")
    assert (cell.sp_degree, cell.cluster.world_size, cell.cluster.threads_per_rank) == (1, 1, 2)
    assert cell.cell_id == make_cell("strategy=local").cell_id


def test_local_with_dp_shard_is_the_data_parallel_base():
    cell = make_cell("strategy=local", "dp_shard=4")
    assert (cell.sp_degree, cell.dp_degree, cell.cluster.world_size) == (1, 4, 4)


@pytest.mark.parametrize(
    ("words", "degrees"),
    [
        ((), (4, 1, 1)),
        (("sp_degree=2",), (2, 1, 2)),
        (("dp_shard=4",), (1, 1, 4)),
        (("dp_replicate=2", "sp_degree=2", "engine=fsdp2"), (2, 2, 1)),
    ],
)
def test_degrees_left_at_auto_use_every_rank(words, degrees):
    cell = make_cell("cluster.world_size=4", *words)
    assert (cell.sp_degree, cell.dp_replicate, cell.dp_shard) == degrees
    assert refusal(cell) is None


def test_what_does_not_change_the_work_does_not_change_the_cell():
    assert make_cell("seq_len=8192").cell_id == make_cell("seq_len=8k").cell_id
    assert make_cell("measure.repeats=3").cell_id == make_cell().cell_id
    assert make_cell("seed=1").cell_id != make_cell().cell_id


def test_a_kernel_is_the_same_for_all_but_strategies_that_are_bound_to_another():
    assert make_cell("strategy=ring").kernel == DEFAULT_KERNEL
    assert make_cell("strategy=torch_cp").kernel == DEFAULT_KERNEL
    assert make_cell("strategy=ring_self_attention").kernel == "math"


def test_padding_fills_what_the_layout_needs_and_no_more():
    padding = [make_cell("pad=true", "strategy=ring", f"seq_len={n}").padding for n in (249, 250, 252)]
    assert padding == [3, 2, 0]
    assert make_cell("pad=true", "strategy=local", "seq_len=249").padding == 0
    assert refusal(make_cell("pad=true", "strategy=ring", "seq_len=249")) is None
    assert refusal(make_cell("pad=true", "strategy=ring", "seq_len=249", "workload=attention")) is not None


PACKED = ("data.packing=documents",)
ILLEGAL = {
    "heads that do not divide": (("cluster.world_size=3", "seq_len=9k"), "choose sp_degree from 1, 2, 4"),
    "a length that does not divide": (("seq_len=8193",), "the nearest is seq_len=8192"),
    "a length that padding would fill": (("strategy=ring", "seq_len=250"), "seq_len=248, or take pad=true"),
    "packing two sequences in DeepSpeed": (
        ("strategy=deepspeed_ulysses", "batch=2", *PACKED),
        "take batch=1",
    ),
    "packing in a published ring": (("strategy=ring_flash_attn", *PACKED), "a multiple of sp_degree"),
    "packing in torch's ring": (("strategy=torch_cp", *PACKED), "not offered here: torch knows documents"),
    "packing of random inputs": (("workload=attention", *PACKED), "take workload=train"),
    "a length too short for zigzag": (("strategy=ring_flash_attn", "seq_len=2"), "multiple of 4"),
    "a layout of another strategy": (("layout=zigzag",), "choose layout=contiguous"),
    "a contiguous ring that rounds dq to bf16": (
        ("strategy=ring_flash_attn", "layout=contiguous", "dtype=fp16"),
        "take dtype=bf16, or layout=zigzag",
    ),
    "full attention of FPDT": (
        ("strategy=deepspeed_fpdt", "workload=attention", "workload.mask=full"),
        "(not asked: DeepSpeed's operation has no `causal` argument",
    ),
    "ring-flash-attn in float32": (("strategy=ring_flash_attn", "dtype=fp32"), "dtype=bf16 or fp16"),
    "kept outputs of layers that are not checkpointed": (
        ("strategy=distflash_attn", "strategy.checkpoints=attention_output", "checkpointing=false"),
        "take checkpointing=true",
    ),
    "kept outputs beside inputs that leave": (
        (
            "strategy=distflash_attn",
            "strategy.checkpoints=attention_output",
            "checkpointing=true",
            "offload.activations=true",
        ),
        "take offload.activations=false",
    ),
    "a fused kernel for scores that are kept": (
        ("strategy=ring_self_attention", "kernel=torch_flash"),
        "choose kernel=math",
    ),
    "ranks that do not multiply out": (("sp_degree=3",), "is not cluster.world_size=2"),
    "replicated ZeRO-3": (("dp_replicate=2",), "engine=fsdp2"),
    "a stride that divides no KV heads": (
        ("strategy=ring_flash_attn_llama3", "strategy.heads_k_stride=3"),
        "choose 1 or 2",
    ),
    "flash-attn on a CPU": (("kernel=flash_attn_2",), "kernel=torch_flash"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_combination_says_why_and_what_to_choose(case):
    words, way_out = ILLEGAL[case]
    reason = refusal(make_cell(*words))
    assert reason is not None
    assert way_out in reason


ON_FLASH_ATTN = ("ring_flash_attn", "ring_flash_attn_llama3", "yunchang_ring", "yunchang_usp")


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ON_FLASH_ATTN)
def test_a_package_on_flash_attn_takes_the_dtypes_of_flash_attn(name, dtype):
    facts = STRATEGIES[name]
    assert facts.dtypes == KERNEL_FACTS["flash_attn_2"].dtypes["cuda"]
    refused = facts.refusals(make_cell(f"strategy={name}", f"dtype={dtype}"))
    assert refused[0] == f"dtype={dtype} is not for {name}; choose dtype=bf16 or fp16"


INVALID = {
    "unknown key": (("+foo=1",), "foo"),
    "unknown key in a group": (("+measure.stepz=1",), r"did you mean measure\.steps\?"),
    "a GPU where there is none": (("cluster=gpu",), "no GPU is visible"),
    "NCCL for CPU ranks": (("cluster=cpu", "cluster.backend=nccl"), "cluster.backend=auto"),
    "a missing data file": (("data.path=/no/such/file",), "no such file"),
    "a prompt as long as the sequence": (("data.prompt_tokens=8k", "seq_len=8k"), "data.prompt_tokens"),
    "all of a sequence as prompt": (("data.prompt_tokens=8192",), "no token"),
    "a checkpoint that is none": (("model=checkpoint", "model.path=/"), "config.json"),
    "KV heads that do not divide heads": (("model=qwen3_nano", "model.num_kv_heads=3"), "must divide"),
    "a variable that is no axis": (("++env.PATH=/",), "set others before"),
    "CUDA's allocator on the CPU": ((f"++{ALLOCATOR}=expandable_segments:True",), "ranks run on the CPU"),
}


ALLOCATOR_SETTINGS = {
    "expandable_segments:True": None,
    "max_split_size_mb:512, roundup_power2_divisions:[256:1,>:4]": None,
    "backend:cudaMallocAsync": "set PYTORCH_ALLOC_CONF=backend:cudaMallocAsync before the command instead",
    "max_split_size_mb:512,backend:native": "the backend is chosen when torch is imported",
    "expandable_segments=True": "must be settings with their values",
    "expandable_segments": "write for example env.PYTORCH_ALLOC_CONF=expandable_segments:True",
    "": "must be settings with their values",
}


@pytest.mark.parametrize("value", ALLOCATOR_SETTINGS)
def test_the_allocator_s_settings_are_refused_where_a_rank_cannot_change_them(value):
    said, words = ALLOCATOR_SETTINGS[value], (f"++{ALLOCATOR}='{value}'",)
    if said is None:
        assert make_cell(*words, machine=FOUR_H100).env == (("PYTORCH_ALLOC_CONF", value),)
        return
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        make_cell(*words, machine=FOUR_H100)
    assert "\n" not in str(refused.value)


def test_one_of_two_names_for_the_allocator_s_settings_is_refused():
    words = (f"++{ALLOCATOR}=expandable_segments:True", "++env.PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64")
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF is set too"):
        make_cell(*words, machine=FOUR_H100)


def test_a_gpu_is_warmed_up_and_timed_longer_than_a_cpu_unless_something_else_is_asked_for():
    cpu, gpu = make_cell().measure, make_cell(machine=FOUR_H100).measure
    assert (cpu.budget_s, cpu.warmup_s, cpu.least_steps) == (20, 0, 0)
    assert (gpu.budget_s, gpu.warmup_s, gpu.least_steps) == (60, 10, 6)
    words = ("measure.budget_s=5", "measure.warmup_s=0", "measure.least_steps=2")
    for machine in (TWO_CORES, FOUR_H100):
        own = make_cell(*words, machine=machine).measure
        assert (own.budget_s, own.warmup_s, own.least_steps) == (5, 0, 2)


NANO = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4,
}  # fmt: skip
CHECKPOINTS = {
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 128},
        "a qwen3_moe has experts, .*; choose a dense model",
    ),
    "experts of a text model": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_local_experts": 16}},
        "a llama4_text has experts",
    ),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "its weights are quantized; name a folder with weights in bf16",
    ),
    "no safetensors": ({}, "contains no .safetensors file; write one"),
    "dropout of scores": ({"attention_dropout": 0.1}, "attention_dropout=0.1, and no strategy drops"),
    "other layers": (
        {"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]},
        "1 of 2 layers are linear_attention; strategies compute plain causal attention",
    ),
    "inside a text model": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma2", "attn_logit_softcapping": 50.0}},
        "attention has capped scores",
    ),
    "another family": (
        {"model_type": "phi3", "sliding_window": 262144},
        "is a phi3, whose layers cells do not build; name a folder of one of qwen3, qwen2, llama, mistral,",
    ),
    "another family inside": (
        {"model_type": "aya_vision", "text_config": {"model_type": "helium"}},
        "is a helium, whose layers",
    ),
    "another rotation": (
        {"rope_scaling": {"type": "su", "long_factor": [1.0]}},
        "rope_type=su, which transformers does not compute for a llama; name a folder with one of default,",
    ),
    "a number that is none": (
        {"num_hidden_layers": 0},
        "by its config.json model.num_layers=0: must be .*; correct it there, or name another folder$",
    ),
    "KV heads that do not divide heads": (
        {"num_key_value_heads": 3},
        "by its config.json model.num_kv_heads=3: must divide model.num_heads=4; correct it there",
    ),
}


def checkpoint(folder, numbers, *, weights=True):
    (folder / "config.json").write_text(json.dumps({**NANO, **numbers}))
    if weights:
        (folder / "model.safetensors").touch()
    return "model=checkpoint", f"model.path={folder}"


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_no_cell_can_train_from_is_refused(tmp_path, case):
    numbers, message = CHECKPOINTS[case]
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: {message}") as refused:
        make_cell(*checkpoint(tmp_path, numbers, weights=case != "no safetensors"))
    assert "\n" not in str(refused.value)
    assert "model.family" not in str(refused.value)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, "layers have sliding_window=512"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 512,
                "max_window_layers": 1,
            },
            "1 of 2 layers have sliding_window=512",
        ),
    ],
)
def test_a_window_is_no_reason_to_refuse_a_sequence_that_it_holds(tmp_path, numbers, reason):
    words = checkpoint(tmp_path, numbers)
    assert refusal(make_cell(*words, "seq_len=512")) is None
    said = refusal(make_cell(*words, "seq_len=1k"))
    assert said == (
        f"{reason}, less than seq_len=1024, and strategies compute plain causal attention; take seq_len=512"
        " or less"
    )


def test_a_model_for_images_is_read_by_its_text_model(tmp_path):
    """As files hold it: in a section of its own, or beside the rest, as older Qwen2.5-VL ones do."""
    inside = {"model_type": "llava", "text_config": {**NANO, "model_type": "mistral", "sliding_window": None}}
    assert make_cell(*checkpoint(tmp_path, inside)).model.family == "mistral"
    tied = {**inside, "tie_word_embeddings": True}
    tied["text_config"] = {**inside["text_config"], "tie_word_embeddings": False}
    assert make_cell(*checkpoint(tmp_path, tied)).model.tied_embeddings
    beside = {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert make_cell(*checkpoint(tmp_path, beside)).model.family == "qwen2"


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_value_is_refused_in_the_users_words(case):
    words, message = INVALID[case]
    with pytest.raises(ConfigError, match=message) as refused:
        make_cell(*words)
    assert "\n" not in str(refused.value)


def test_the_networks_name_is_of_cells_on_several_nodes_and_tells_them_apart():
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
