"""Command lines that are refused, by us or by Hydra, in one line and before anything runs."""

import shlex
import signal
import subprocess
import sys

import pytest

import run_sweep
from bench.common.environment import REPOSITORY
from bench.config import ConfigError, ExitCode
from bench.request.choices import WITHOUT_FILE, groups, options
from bench.request.command_line import FIRST_PROCESS_S, refuse_several_processes
from bench.request.resolve import all_keys
from bench.request.values import NOT_OFFERED, SYNONYMS
from bench.run.interrupts import SIGNALS
from tests.support.cells import TWO_CORES


@pytest.fixture
def run_command(tmp_path, monkeypatch, capsys):
    """Yield a function that runs a command line up to the first cell: (exit code, cells, stderr)."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def run_line(line):
        started = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(run_sweep, "this_machine", lambda: TWO_CORES)
        monkeypatch.setattr(run_sweep, "run_plan", lambda plan, *_, **__: started.extend(plan.cells) or 0)
        monkeypatch.setattr(sys, "argv", ["run_sweep.py", *shlex.split(line)])
        with pytest.raises(SystemExit) as ended:
            run_sweep.main()
        return ended.value.code, started, capsys.readouterr().err.strip()

    yield run_line
    for number, handler in handlers.items():  # threads of later tests must not find the command's
        signal.signal(number, handler)


def refused(run_command, tmp_path, line):
    """Return the line with which a command line is refused."""
    code, started, message = run_command(line)
    assert (code, started, list(tmp_path.iterdir())) == (2, [], [])
    assert len(message.splitlines()) == 1
    assert "Traceback" not in message
    return message


HYDRAS_ERRORS = {
    "an unknown key": ("seqlen=8k", "did you mean seq_len?"),
    "Accelerate's word for a key": ("sp_size=4", "did you mean sp_degree?"),
    "torch's word for a key": ("context_parallel_size=4", "did you mean sp_degree?"),
    "another word in a group": ("cluster.cp_size=4", "did you mean sp_degree?"),
    "an option of Megatron-LM": ("--micro-batch-size 2", "did you mean batch=...?"),
    "another word with dashes": ("--sp-size=4", "did you mean sp_degree=4?"),
    "a strategy as a key": ("ring_attention=true", "did you mean strategy?"),
    "a strategy's common name": (
        "strategy=ring_attention",
        "did you mean strategy=ring, or strategy=ring_flash_attn, which runs the published package?",
    ),
    "a model's name on the hub": ("model=Qwen/Qwen3-4B", "did you mean model=qwen3_4b?"),
    "a model that is spelt in another way": (
        "model=meta-llama/Llama-3.1-8B",
        "did you mean model=llama3_1_8b?",
    ),
    "a key below a value": ("measure.steps.foo=1", "did you mean measure.steps?"),
    "a model with experts": ("model=qwen3_30b_a3b", "model=qwen3_30b_a3b: this model has experts"),
    "an unknown choice by its name": ("-m strategy.name=foo", "strategy=foo: must be one of"),
    "an unknown group": ("foo/bar=3", "no such key"),
    "no choice": ("strategy=", "must be one of"),
    "an empty group": ("measure={}", "measure={}: must be one of standard"),
    "a group that is added": ("+strategy=ring", "neither add, delete nor move a key; write strategy=ring"),
    "a value taken away": ("~seq_len", "neither add, delete"),
    "a moved group": ("strategy@model=ring", "write strategy=ring"),
    "Hydra's own folder": ("hydra.run.dir=x", "sweep_dir=..."),
    "no equals sign": ("seq_len", "is not of the form key=value"),
    "no key": ("=8k", "is not of the form key=value"),
    "two equals signs": ("seq_len==8k", "'seq_len=\"8k\"'"),
    "spaces round the sign": ("'seq_len = 8k'", "'seq_len=\"8k\"'"),
    "brackets behind a key": ("measure[0]=3", "'measure=\"3\"'"),
    "an interpolation without end": ("'seq_len=${batch'", "cannot be read"),
    "a variable that is not set": ("'seq_len=${oc.env:NO_SUCH_VARIABLE}'", "NO_SUCH_VARIABLE is not set"),
    "a reference to nothing": ("'seq_len=${bach}'", "did you mean batch?"),
    "a reference to itself": ("'seq_len=${seq_len}'", "refers to itself"),
    "an unknown resolver": ("'seq_len=${nosuch:1}'", "${nosuch:...}: no such function"),
    "a resolver's own error": ("'seq_len=${oc.decode:3}'", "seq_len: cannot be filled in"),
    "a list without -m": ("seq_len=8k,64k", "-m seq_len=8k,64k"),
    "a list in brackets with -m": ("-m seq_len=[8k,64k] strategy=local", "-m seq_len=8k,64k"),
    "an empty range": ("-m 'seed=range(0)'", "has no values"),
    "a pattern that nothing fits": ("-m 'strategy=glob(x*)'", "has no values"),
    "a million cells": ("-m 'seed=range(1000)' 'batch=range(1,1001)'", "at most 10000"),
    "a million repeats": ("measure.repeats=1000000", "at most 10000"),
    "two folders": ("-m sweep_dir=a,b", "applies to the whole sweep"),
    "two experiments": ("-m experiment=none,max_length", "runs one experiment"),
    "a key with dashes": ("--seq-len=8k", "write seq_len=8k"),
    "an unknown option": ("--multi", "did you mean --multirun?"),
    "another configuration": ("--config-name nonsense", "conf/config.yaml is the only configuration"),
    "a list": ("-m seq_len=[8k,64k]", "without brackets: -m seq_len=8k,64k"),
    "a list of names": ("-m dtype=[bf16,fp16]", "without brackets: -m dtype=bf16,fp16"),
    "nothing to show": ("--cfg", "--cfg=null: must be one of"),
    "nonsense to show": ("--cfg jobs", "did you mean --cfg=job?"),
    "to show and to sweep": ("-m --cfg job", "leave out -m"),
    "a bad value in the seventh cell": ("-m seq_len=1k,2k,3k,4k,5k,6k,7q strategy=local", "seq_len=7q"),
    "a bad choice in the last cell": ("-m strategy=local,ring,ulises", "did you mean strategy=ulysses?"),
    "a variable that is no axis": ("-m env.PATH=1,2 strategy=local", "env.PATH"),
    "a value for a group of values": ("offload=true", "write offload.activations="),
    "a nested variable": ("env.NCCL_ALGO.x=3", "must be text"),
    "a null variable": ("env.NCCL_ALGO=null", "must be text"),
    "a number that Python does not read": (f"seq_len={'9' * 5000}", "cannot be read, it is too long"),
    "brackets without end": (f"seed={'[' * 3000}{']' * 3000}", "cannot be read, it is nested too deeply"),
    "a letter that no terminal prints": ("'--seq\x1b[2J'", "--seq\\x1b[2J: has characters that cannot"),
}  # fmt: skip


@pytest.mark.parametrize("case", HYDRAS_ERRORS)
def test_invalid_command_line_is_refused_in_one_line(run_command, tmp_path, case):
    line, message = HYDRAS_ERRORS[case]
    assert message in refused(run_command, tmp_path, line)


WORDS_OF_OTHERS = {
    "ulysses_sequence_parallel_size=2": "sp_degree", "actor.ring_attn_size=2": "sp_degree",
    "parallelism_config_cp_size=2": "sp_degree", "cutoff_len=4096": "seq_len",
    "max_model_len=4096": "seq_len",
    "zero_stage=3": "engine", "deepspeed=ds.json": "engine", "attn_impl=flash": "kernel",
    "cp_comm_type=a2a": "strategy", "strategy=all_gather": "strategy=gather_kv",
    "parallelism_config_cp_comm_strategy=alltoall": "strategy.rotation", "ring_attn_func=x": "strategy",
    "max_context_length=4096": "seq_len", "recompute_granularity=full": "checkpointing",
    "bf16=true": "dtype", "kernel=sdpa": "kernel=torch_flash", "trainer=sft": "trainer=trl",
    "sample_packing=true": "data.packing", "num_machines=2": "cluster.nodes", "hostfile=x": "cluster.hosts",
    "data.packing=true": "data.packing=documents", "train_files=x": "data.path",
    "data_parallel_shard_degree=2": "dp_shard", "model_id=x": "model",
    "parallelism_config_dp_replicate_size=2": "dp_replicate",
    "kernel=fa3": "kernel=flash_attn_3", "kernel=flash_attention_2": "kernel=flash_attn_2",
    "optimizer.lr=1e-4": "optimizer.learning_rate", "engine=deepspeed": "engine=zero3",
    "engine=fully_shard": "engine=fsdp2",
    "strategy=alst": "strategy=deepspeed_ulysses",
    "strategy=llama3_ring": "strategy=ring_flash_attn_llama3", "layout=load_balanced": "layout=zigzag",
    "trainer=hf": "trainer=transformers",
}  # fmt: skip
"""Keys and values of other stacks, each with ours."""


@pytest.mark.parametrize("word", WORDS_OF_OTHERS)
def test_word_of_another_stack_is_refused_with_ours(run_command, tmp_path, word):
    assert f"did you mean {WORDS_OF_OTHERS[word]}?" in refused(run_command, tmp_path, word)


NOT_OFFERED_HERE = {
    "config_file=a.yaml": "docs/coming_from.md", "--config_file a.yaml": "docs/coming_from.md",
    "torch_compile=true": "torch.compile is not offered", "model.lora_r=8": "LoRA are not offered",
    "--use_liger_kernel=true": "loss=chunked", "liger=true": "loss=chunked",
    "moe=true": "dense models", "report_to=none": "sweep_dir=FOLDER", "quant_bits=4": "dtype=bf16",
    "sliding_window=4096": "data.packing=documents", "tp_degree=2": "sp_degree, dp_shard",
    "offload.params=true": "offload.optimizer=true", "dtype=fp8": "dtype=bf16", "loss=liger": "loss=chunked",
    "engine=zero1": "engine=zero3 shards", "engine=zero2": "engine=zero3 shards",
    "optimizer.dtype=bf16": "state is float32",
    "tensor_model_parallel_size=2": "sp_degree, dp_shard", "global_batch_size=64": "batch times grad_accum",
    "hardware=h20": "148 instead of 989", "hardware=A800-SXM4-80GB": "a100_80gb is nearest",
    "hardware=b300": "b200 is nearest", "hardware=mi300x": "AMD's GPUs are not supported",
}  # fmt: skip
"""Words that no word of ours replaces, each with a part of the answer."""


@pytest.mark.parametrize("word", NOT_OFFERED_HERE)
def test_word_for_what_is_not_offered_gets_an_answer(run_command, tmp_path, word):
    message = refused(run_command, tmp_path, word)
    assert NOT_OFFERED_HERE[word] in message
    assert "did you mean" not in message


def test_no_key_of_ours_has_an_answer_of_another_tool():
    answered = {word for words in NOT_OFFERED.values() for word in words}
    assert not answered & {*all_keys(), *groups()}
    assert not answered & {word for words in SYNONYMS.values() for word in words}
    assert not {*WITHOUT_FILE} & {*options("hardware")}


LAUNCHED = {
    "torchrun": ("python /usr/bin/torchrun --nproc-per-node=2 run_sweep.py", "WORLD_SIZE", "RANK"),
    "srun": ("slurmstepd: [7.0]", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("mpirun -n 2 python run_sweep.py", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("hydra_pmi_proxy --control-port", "PMI_SIZE", "PMI_RANK"),
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_sweep_in_several_processes_is_refused_once(launcher, monkeypatch):
    waited_s = []
    monkeypatch.setattr("time.sleep", waited_s.append)
    parent, count, rank = LAUNCHED[launcher]
    with pytest.raises(ConfigError, match=f"started 2 processes.*without {launcher}"):
        refuse_several_processes({count: "2", rank: "0"}, parent)
    with pytest.raises(SystemExit) as silent:
        refuse_several_processes({count: "2", rank: "1"}, parent)
    assert (silent.value.code, waited_s) == (ExitCode.INVALID_REQUEST, [FIRST_PROCESS_S])
    refuse_several_processes({count: "2", rank: "1"}, "bash")  # left over in a shell
    refuse_several_processes({count: "1", rank: "0"}, parent)


@pytest.mark.ranks
def test_sweep_under_torchrun_is_refused_in_one_line(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "run_sweep.py"]
    done = subprocess.run(
        [*command, f"sweep_dir={tmp_path / 'out'}"],
        capture_output=True, text=True, check=False, timeout=120, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.stderr.count("each would run the whole sweep") == 1
    assert not (tmp_path / "out").exists()


SWEEPS = {
    "nothing but -m": ("-m", 3),
    "-m at the end, twice": ("strategy=local --multirun -m", 1),
    "one length, written three ways": ("-m seq_len=8k,8K,8192 strategy=local", 1),
    "an illegal cell among legal ones": ("-m strategy=local,ulysses sp_degree=3", 2),
    "a pattern": ("-m 'strategy=glob(usp*)'", 1),
    "a variable as an axis": ("-m env.NCCL_ALGO=Ring,Tree strategy=local", 2),
    "a value from the environment": ("'seq_len=${oc.env:NO_SUCH_VARIABLE,4k}'", 1),
    "a key given twice": ("seq_len=8k seq_len=16k", 1),
}


@pytest.mark.parametrize("case", SWEEPS)
def test_odd_but_valid_command_line_runs(run_command, case):
    line, cells = SWEEPS[case]
    code, started, message = run_command(line)
    assert (code, len(started), message) == (0, cells, "")
