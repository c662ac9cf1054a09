"""Values, combinations, devices and texts that are refused, and unusual ones that are legal."""

import shlex
from dataclasses import replace

import pytest

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.common.nvml import visible_devices
from bench.config import MAX_SECONDS, MAX_WHOLE, ConfigError, Seconds
from bench.plan.planned import planned_cell
from bench.request import values
from bench.request.choices import groups
from bench.request.legality import refusal
from bench.request.placement import MAX_CPU_RANKS
from bench.request.resolve import AGENT_KEYS, SWEEP_KEYS, all_keys
from bench.run.cell.run import run
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell


def cell_of(line, machine=TWO_CORES):
    """Return the cell that the command line would make of these words."""
    return make_cell(*shlex.split(line), machine=machine)


NUMBERS = (
    "batch", "grad_accum", "sp_degree", "ulysses_degree", "dp_replicate", "dp_shard", "cluster.world_size",
    "cluster.threads_per_rank", "cluster.ranks_per_gpu", "measure.steps", "measure.repeats",
    "optimizer.schedule_steps",
)  # fmt: skip
NO_NUMBERS = ("0", "-1", "1.5", "null", "", "two", "true", "[1]")
FROM_ZERO = (
    "seed",
    "optimizer.warmup_steps",
    "measure.warmup_steps",
    "measure.min_timed_steps",
    "data.prompt_tokens",
)
SECONDS = ("measure.timeout_s", "measure.budget_s")
FLAGS = (
    "checkpointing", "tiled_mlp", "offload.activations", "offload.optimizer", "measure.trace",
)  # fmt: skip
CHOICES = (
    "dtype", "kernel", "layout", "loss", "mode", "cluster.device", "optimizer.schedule",
)  # fmt: skip
NANO = "model=qwen3_nano model."
BAD_VALUES = {
    **{
        f"seq_len={word}": "write for example seq_len=8k"
        for word in (
            "8Ki", "1.5k", "0", "-1", "8.5", "nan", "inf", "null", "", "true", "[8k,64k]", "'\"8k,64k\"'",
            "0x10", "1" + 30 * "0", "1e400", "8kk", "'\" 8k \"'", "'\"\uff18k\"'", "-8k", "+8k", "8_k", "1t",
            "{a:1}", "'8k 64k'",
        )
    },
    **{f"{key}={word}": f"{key}=" for key in NUMBERS for word in NO_NUMBERS},
    **{f"{key}={word}": f"{key}=" for key in FROM_ZERO for word in ("-1", "0.5", "null", "8k")},
    **{f"{key}={MAX_WHOLE + 1}": str(MAX_WHOLE) for key in ("batch", "seed", "measure.steps")},
    **{
        f"{key}={word}": f"number of seconds up to {MAX_SECONDS}; write for example {key}=20"
        for key in SECONDS
        for word in ("0", "-1", "nan", "inf", "1e300", "20s", "null", "true")
    },
    **{
        f"{key}={word}": f"must be true or false; write for example {key}=true"
        for key in FLAGS
        for word in ("1", "yes", "null", "maybe")
    },
    **{f"{key}={word}": "must be one of" for key in CHOICES for word in ("null", "3", "nonsense", "[a]")},
    "dtype=fp9": "bf16, fp16, fp32, fp64",
    "dtype=float": "did you mean dtype=fp32?",
    "dtype=torch.float16": "did you mean dtype=fp16?",
    "kernel=flash": "did you mean kernel=torch_flash?",
    "cluster.device=gpu": "did you mean cluster.device=cuda?",
    "cluster=gpu": "cluster=gpu: no GPU is visible here; take cluster=cpu",
    "cluster.name=mine": "must be one of auto, cpu, gpu",
    f"cluster.world_size={MAX_CPU_RANKS + 1}": f"write cluster.world_size={MAX_CPU_RANKS}",
    "strategy=local dp_shard=1000": "CPU ranks are allowed; write",
    "strategy=local dp_shard=4 cluster.world_size=2": "write cluster.world_size=4",
    "cluster.threads_per_rank=3": "may use 2 cores",
    "cluster.ranks_per_gpu=2": "the ranks run on the CPU, not on a GPU; write cluster.ranks_per_gpu=1",
    "cluster.numa_binding=node": "the ranks run on the CPU, not on a GPU; leave it out",
    "measure.nvtx=true": "the ranks run on the CPU, not on a GPU; leave it out",
    "mode=predict hardware=h100_80gb cluster.numa_binding=nodes": "did you mean cluster.numa_binding=node?",
    f"{NANO}num_heads=0": "whole number from 1",
    f"{NANO}num_kv_heads=3": "must divide model.num_heads=4",
    f"{NANO}head_dim=7": "write for example model.head_dim=8",
    **{f"{NANO}rope_theta={word}": "must be a positive number" for word in ("abc", "0", "-1", "nan", "null")},
    f"{NANO}norm_eps=[1]": "must be a positive number",
    f"{NANO}name=null": "model.name=null",
    f"{NANO}family=gpt": "must be one of llama, mistral, qwen2, qwen3",
    f"{NANO}path=/no/such/folder": "no such file or folder",
    "model=checkpoint": "model.path=null: is not the name of a folder",
    "model=checkpoint model.path=/etc/passwd": "is not a checkpoint folder",
    **{f"optimizer.learning_rate={word}": "must be a positive number" for word in ("0", "-1", "nan", "null")},
    **{f"optimizer.max_grad_norm={word}": "must be 0 or a positive number" for word in ("-1", "inf", "yes")},
    "optimizer.name=adam": "did you mean optimizer=adamw?",
    "hardware.name=h100": "did you mean hardware=h100_80gb?",
    "experiment.name=[1]": "experiment=[1]: must be one of",
    **{f"data.path={word}": "data.path=" for word in ("/no/such", "3", "[a]", "''", "/proc/self/mem")},
    "data.tokenizer=/no/such/folder": "no such file or folder",
    "data.prompt_tokens=8192": "leaves no token of seq_len=8192",
    "data.prompt_tokens=8k seq_len=8k": "data.prompt_tokens=8k",
    "data.packing=docs": "must be one of documents, none",
    "pad=2": "pad=2",
    "strategy=ulysses_chunked strategy.chunks=0": "strategy.chunks=0: must be a whole number from 1",
    "strategy=ulysses_chunked strategy.overlap=2": "strategy.overlap=2: must be true or false",
    "+foo=1": "foo: no such key",
    "+inject_fault=mask_off_by_one": "inject_fault: no such key",
    "+data.rank_order=reversed": "data.rank_order: no such key",
    "+measure.stepz=1": "did you mean measure.steps?",
    "+measure.least_steps=3": "did you mean measure.min_timed_steps?",
    "++env.PATH=/": "set others before the command",
    "env=3": "write env.NAME=value",
    "offload=true": "offload=true: must be values with their keys; write offload.activations=",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_VALUES)
def test_bad_value_is_refused_with_rule_and_way_out(line):
    with pytest.raises(ConfigError) as refusal_:
        cell_of(line)
    assert BAD_VALUES[line] in str(refusal_.value)
    assert len(str(refusal_.value).splitlines()) == 1


def test_text_is_converted_to_the_number_that_it_means():
    assert [values.tokens("seq_len", word) for word in ("8K", "96k", "1m", 8e3)] == [8192, 98304, 2**20, 8000]
    assert values.whole_number("batch", "4") == values.convert("x", "4", Seconds) == 4  # variables are text
    for word in ("\ud800", "20s", None):
        with pytest.raises(ConfigError, match=r"x=.*: must be a positive number"):
            values.convert("x", word, Seconds)


GOOD_VALUES = (
    "seq_len=8K", "seq_len=8e3", "seq_len=1_000", "seq_len=010", "seq_len=1m", "batch=2.0", "measure.steps=1",
    "measure.steps=5", "measure.warmup_steps=0", "measure.timeout_s=1e-3", "cluster.world_size=1",
    f"seed={MAX_WHOLE}", f"{NANO}hidden_size=100", f"{NANO}head_dim=512",
    f"{NANO}num_kv_heads=1", f"{NANO}name=mine", "strategy=local cluster.world_size=8",
)  # fmt: skip


@pytest.mark.parametrize("line", GOOD_VALUES)
def test_unusual_value_is_a_legal_cell(line):
    assert refusal(cell_of(line)) is None


KEPT = "strategy=distflash_attn strategy.checkpoints=attention_output"
ILLEGAL = {
    "seq_len=1": "the nearest is seq_len=2",
    "seq_len=8192 strategy=ring cluster.world_size=3": "the nearest is seq_len=8190",
    "seq_len=2 strategy=ring_flash_attn": "multiple of 4",
    "seq_len=250 strategy=ring": "seq_len=248, or take pad=true",
    "cluster.world_size=3 seq_len=9k": "choose sp_degree from 1, 2, 4",
    "sp_degree=3 dp_shard=2 cluster.world_size=4": "is not cluster.world_size=4",
    "engine.leaf=layer": "take engine=zero3",
    "ulysses_degree=1": "leave ulysses_degree=auto",
    "strategy=usp ulysses_degree=3": "must divide sp_degree=2",
    "kernel=cudnn": "cluster=gpu",
    "kernel=flash_attn_2": "kernel=torch_flash",
    "strategy=ring_self_attention kernel=torch_flash": "choose kernel=math",
    "strategy=ring_flash_attn dtype=fp32": "dtype=bf16 or fp16",
    "strategy=ring_flash_attn layout=contiguous dtype=fp16": "take dtype=bf16, or layout=zigzag",
    "strategy=ring_flash_attn_llama3 strategy.heads_k_stride=3": "choose 1 or 2",
    "layout=zigzag": "choose layout=contiguous",
    "strategy=deepspeed_fpdt workload=attention workload.mask=full": "operation has no `causal` argument",
    f"{KEPT} checkpointing=false": "take checkpointing=true",
    f"{KEPT} checkpointing=true offload.activations=true": "take offload.activations=false",
    "strategy=deepspeed_ulysses batch=2 data.packing=documents": "take batch=1",
    "strategy=ring_flash_attn data.packing=documents": "multiples of sp_degree",
    "strategy=torch_cp data.packing=documents": "torch supports documents",
    "workload=attention data.packing=documents": "take workload=train",
    "offload.activations=true": "take checkpointing=true",
    "offload.optimizer=true engine=ddp": "take engine=zero3",
}


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_combination_has_a_way_out_and_a_record(line):
    cell = cell_of(line)
    assert ILLEGAL[line] in refusal(cell)
    record = run(planned_cell(cell, TWO_CORES), launcher=None, folder=None)
    assert (record.status, record.reason) == ("unsupported", refusal(cell))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cluster.world_size=5", "4 GPUs are visible; write cluster.world_size=4, or less"),
        ("cluster.world_size=5", "share GPUs: cluster.ranks_per_gpu=2"),
        ("cluster.world_size=9 cluster.ranks_per_gpu=2", "4 GPUs are visible and cluster.ranks_per_gpu=2;"),
        ("cluster.world_size=65", "write cluster.world_size=4, or less$"),
        ("cluster.ranks_per_gpu=17", "at most 16 ranks share a GPU"),
        ("strategy=local dp_shard=8", "4 GPUs are visible"),
    ],
)
def test_more_ranks_than_gpus_are_refused(line, message):
    with pytest.raises(ConfigError, match=message):
        cell_of(line, FOUR_H100)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "alternative"),
    [
        *((name, 264, "math") for name, facts in KERNEL_FACTS.items() if facts.max_head_dim),
        *((name, 68, "math") for name in KERNEL_FACTS if name != "math"),
        ("cudnn", 192, "torch_flash"),
    ],
)
def test_unsupported_head_dim_is_refused_with_another_kernel(kernel, head_dim, alternative):
    refused = cell_of(f"{NANO}head_dim={head_dim} kernel={kernel}", FOUR_H100)
    assert f"choose kernel={alternative}" in refusal(refused)
    other = cell_of(f"{NANO}head_dim={head_dim} kernel={alternative}", FOUR_H100)
    assert refusal(other) is None


@pytest.mark.parametrize("line", ["", "cluster=gpu", "cluster.device=cuda"])
def test_unreadable_gpu_is_refused_and_not_replaced_by_cpu(line):
    broken = replace(
        TWO_CORES, gpu_error="/dev/nvidiactl is there, but NVML cannot read its GPU; see what nvidia-smi says"
    )
    with pytest.raises(ConfigError, match=r"its GPU; see what nvidia-smi says, or take cluster=cpu") as error:
        cell_of(line, broken)
    assert "\n" not in str(error.value)
    assert cell_of("cluster=cpu", broken).cluster.device == "cpu"


UUIDS = ("GPU-aaa1", "GPU-aab2", "GPU-ccc3")


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        (None, [0, 1, 2]), ("", []), ("-1", []), (" ", []), ("1", [1]), ("2,0", [2, 0]), (" 0 , 1 ", [0, 1]),
        ("0,0", []), ("0,3,1", [0]), ("3", []), ("0,-1,1", [0]), ("GPU-c", [2]),
        ("GPU-aaa1,GPU-ccc3", [0, 2]),
        ("GPU-a", []), ("GPU-nonsense", []), ("none", []), ("0,x,1", [0]), ("\uff11", []), ("MIG-1", []),
    ],
)  # fmt: skip
def test_visible_devices_are_those_of_cuda(variable, devices):
    assert visible_devices(variable, UUIDS) == devices


TEXTS = {
    "empty.txt": b"",
    "newlines.txt": b"\n\n",
    "utf16.txt": "text".encode("utf-16"),
    "packed.txt": b"\x1f\x8b\x08\x00\x00",
    "latin1.txt": "caf\u00e9".encode("latin-1"),
    "no_json.jsonl": b"text\n",
    "no_text.jsonl": b'{"words": "a"}\n',
    "torn.jsonl": b'{"text": "a"}\n{"te',
    "a_list.jsonl": b"[1]\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_data_file_without_text_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(TEXTS[name])
    with pytest.raises(ConfigError, match=rf"data\.path=.*{name}: (holds no text|cannot be read)"):
        make_cell(f"data.path={tmp_path / name}")


def test_data_folder_without_text_or_link_loop_is_refused(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "figures").mkdir()
    for name, message in (("circle", "no such file"), ("figures", "holds no text")):
        with pytest.raises(ConfigError, match=message):
            make_cell(f"data.path={tmp_path / name}")


def test_every_key_refuses_a_mapping_as_value():
    for key in all_keys():
        section, _, name = key.rpartition(".")
        if name in (*SWEEP_KEYS, *AGENT_KEYS, "length_step") or key in groups():
            continue
        if key == "env" or section == "model":
            continue
        with pytest.raises(ConfigError):
            cell_of(f"{key}={{a:1}}")
