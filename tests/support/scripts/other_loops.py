"""Training loops as different as people write them; each hands back its losses, step by step.

`observed(model, group)` is the context around a step: `bench.observe`, or nothing.
"""

from functools import partial
from tempfile import TemporaryDirectory
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_gather, all_to_all_single, reduce_scatter
from torch.distributed.nn.functional import all_reduce as autograd_all_reduce
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

import bench
from bench.strategies.torch_cp.attention import register_cpu_flash_operator
from tests.support.scripts.own_loop import NUMBERS, VOCABULARY

STEPS, BATCH, LENGTH = 12, 2, 64


def small_model(attention="sdpa", **more):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**NUMBERS, attn_implementation=attention, **more))


def ddp_model(**more):
    return DistributedDataParallel(small_model(**more))


def tokens(number):
    """Return the tokens of this rank, which no other rank trains on."""
    seed = number * dist.get_world_size() + dist.get_rank()
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model, number):
    ids = tokens(number)
    return model(input_ids=ids, labels=ids).loss


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def trained(observed, model, loss_of=loss_of, step=None, after=lambda: None):
    """The loop of most people; `step` is backward and update, `after` what comes last in the context."""
    optimizer = adamw(model)

    def backward_and_update(loss):
        loss.backward()
        update(optimizer)

    for number in range(STEPS):
        with observed(model):
            loss = loss_of(model, number)
            (step or backward_and_update)(loss)
            after()
        yield loss.item()


def ddp(observed):
    """Train with dropout: one more random number drawn by the observation would change all later losses."""
    return trained(observed, ddp_model(attention_dropout=0.1))


def checkpointing(observed, *, use_reentrant):
    model = small_model(attention_dropout=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return trained(observed, DistributedDataParallel(model, static_graph=True))


def fsdp2(observed):
    model = small_model()
    for layer in model.model.layers:
        fully_shard(layer)
    return trained(observed, fully_shard(model))


def fsdp1(observed):
    return trained(observed, FullyShardedDataParallel(small_model(), device_id=torch.device("cpu")))


def deepspeed_engine(model, stage, **more):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config, **more)[0]


def deepspeed_zero(observed, *, stage):
    engine = deepspeed_engine(small_model(), stage)
    return trained(observed, engine, step=lambda loss: (engine.backward(loss), engine.step()))


def accelerate(observed):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_model()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(STEPS):
        with observed(model), accelerator.accumulate(model):
            loss = loss_of(model, number)
            accelerator.backward(loss)
            update(optimizer)
        yield loss.item()


def alst(observed):
    """DeepSpeed's Ulysses for Hugging Face models, driven as its tutorial does."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    deepspeed.ops.__compatible_ops__ = {}  # compiles nothing for `inference_all_reduce`
    deepspeed.init_distributed("gloo", verbose=False)
    ranks, model = dist.get_world_size(), small_model()
    mpu = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, BATCH)
    engine, group = deepspeed_engine(model, stage=3, mpu=mpu), mpu.get_sequence_parallel_group()
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    batches = [
        {"input_ids": tokens(number), "labels": tokens(number), "position_ids": positions}
        for number in range(STEPS)
    ]
    shards = ulysses_sp.UlyssesSPDataLoaderAdapter(batches, dist.get_rank(), group, ranks, engine.device)
    for batch in shards:
        labels = batch.pop("shift_labels")
        with observed(engine, group, strategy="deepspeed_ulysses") as step:
            logits = engine(**batch).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            valid = (labels != -100).sum()
            counts = all_gather(valid, group=group)
            means = all_gather(loss, group=group)
            mean = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
            if step is not None:
                step.loss(mean, valid)
            engine.backward(mean)
            engine.step()
        yield loss.item()


def transformers_trainer(observed, **choices):
    """Steps of a Trainer; a callback observes them if `observed` is a partial of `bench.observe`."""
    from transformers import Trainer, TrainingArguments

    losses = []
    rows = [
        {"input_ids": ids, "labels": partly_ignored(ids)} for each in range(STEPS) for ids in tokens(each)
    ]

    class LossesOfTrainer(Trainer):
        def training_step(self, *args, **named):
            loss = super().training_step(*args, **named)
            losses.append(loss.item())
            return loss

    with TemporaryDirectory() as folder:
        chosen = TrainingArguments(
            folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = LossesOfTrainer(small_model(attention_dropout=0.1), chosen, train_dataset=rows, **choices)
        if isinstance(observed, partial):
            trainer.add_callback(bench.ObserveCallback(**observed.keywords))
        trainer.train()
    return losses


def partly_ignored(ids):
    """Labels of which another number counts in every row."""
    labels = ids.clone()
    labels[: int(ids[0]) % (LENGTH // 2)] = -100
    return labels


def fsdp2_context_parallel(observed):
    """torch's own, on a mesh of all ranks; on a CPU its operator needs two kernels."""
    register_cpu_flash_operator()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    AttentionInterface.register("context_parallel", partial(attention_of_shards, mesh))
    model = small_model("context_parallel")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    for number in range(STEPS):
        whole = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(number))
        ids, labels, positions = whole[:, :-1].clone(), whole[:, 1:].clone(), torch.arange(LENGTH)[None]
        with observed(model, mesh) as step:
            with context_parallel(mesh, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
                logits = model(input_ids=ids, position_ids=positions).logits
                loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
                if step is not None:
                    step.loss(loss, labels.numel())
                loss.backward()
            update(optimizer)
        yield loss.item()


def attention_of_shards(mesh, module, query, key, value, attention_mask, *, scaling, **_):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    q, k, v = (
        DTensor.from_local(x.contiguous(), mesh, [Shard(2)], run_check=False) for x in (query, key, value)
    )
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scaling)[0]
    return out.to_local().transpose(1, 2), None


def all_collectives(observed):
    """Train with all collectives that a loop may call, of tensors and objects, with and without gradients."""
    ranks = dist.get_world_size()

    def gathered(model, number):
        loss = loss_of(model, number)
        loss = torch.stack(all_gather(loss)).mean() + autograd_all_reduce(loss) * 0.1
        loss = loss + all_to_all_single(torch.empty(ranks), loss.expand(ranks).contiguous()).mean()
        return loss + reduce_scatter(torch.empty(()), [loss] * ranks) * 0.1

    return trained(observed, ddp_model(), gathered, after=partial(spread, ranks))


def spread(ranks):
    """Every collective without a gradient; none changes anything."""
    rank, one, whole = dist.get_rank(), torch.ones(()), torch.arange(2.0 * ranks)
    parts = [*whole.split(2)]
    dist.scatter(torch.empty(2), parts if rank == 0 else None)
    dist.gather(one, [torch.empty(()) for _ in range(ranks)] if rank == 0 else None)
    dist.reduce(one.clone(), 0)
    dist.broadcast(one.clone(), 0)
    dist.reduce_scatter_tensor(torch.empty(2), whole)
    dist.all_gather_into_tensor(torch.empty(ranks), one.reshape(1))
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.barrier()
    dist.monitored_barrier()
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    dist.gather_object(rank, objects if rank == 0 else None)
    dist.broadcast_object_list(objects, 0)
    dist.scatter_object_list([None], objects if rank == 0 else None)
    dist.all_reduce_coalesced([one.clone(), one.clone()])
    dist.all_gather_coalesced([[torch.empty(()), torch.empty(())] for _ in range(ranks)], [one, one])


def autocast_with_grad_scaler(observed):
    model = ddp_model()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")

    def scaled(loss):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return trained(observed, model, torch.autocast("cpu", torch.float16)(loss_of), scaled)


def one_model(observed):
    """No wrapper and no collective: also what a single rank has."""
    return trained(observed, small_model("eager", attention_dropout=0.1))


def in_a_thread(observed):
    losses = []
    thread = Thread(target=lambda: losses.extend(ddp(observed)))
    thread.start()
    thread.join()
    return losses


def profiler_in_a_step(observed):
    waiting = torch.profiler.schedule(skip_first=3, wait=2, warmup=1, active=1)
    with torch.profiler.profile(schedule=waiting) as profiler:
        yield from trained(observed, ddp_model(), after=profiler.step)


LOOPS = {
    "alst": alst,
    "ddp": ddp,
    "checkpointing_reentrant": partial(checkpointing, use_reentrant=True),
    "checkpointing": partial(checkpointing, use_reentrant=False),
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "zero1": partial(deepspeed_zero, stage=1),
    "zero2": partial(deepspeed_zero, stage=2),
    "zero3": partial(deepspeed_zero, stage=3),
    "accelerate": accelerate,
    "transformers_trainer": transformers_trainer,
    "fsdp2_context_parallel": fsdp2_context_parallel,
    "all_collectives": all_collectives,
    "autocast_with_grad_scaler": autocast_with_grad_scaler,
    "one_model": one_model,
    "in_a_thread": in_a_thread,
    "profiler_in_a_step": profiler_in_a_step,
}
