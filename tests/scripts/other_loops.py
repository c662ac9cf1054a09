"""Training loops as different as people write them; each hands back its losses, step by step.

`observed(model, group)` is the context around a step: `bench.observe`, or nothing.
"""

import copy
from contextlib import nullcontext, suppress
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_gather, all_to_all_single, reduce_scatter
from torch.distributed.nn.functional import all_reduce as autograd_all_reduce
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from bench.strategies.torch_cp.attention import flash_operator_for_cpu
from tests.scripts.own_loop import NUMBERS, VOCABULARY, shard_of

STEPS, BATCH, LENGTH, SPIKE = 12, 2, 64, 5


def small_model(attention="sdpa", **more):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**NUMBERS, attn_implementation=attention, **more))


def tokens(number, length=LENGTH):
    """What this rank trains on; nobody else does."""
    seed = number * dist.get_world_size() + dist.get_rank()
    return torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def batch(number, length=LENGTH):
    ids = tokens(number, length)
    return {"input_ids": ids, "labels": ids}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def average_gradients(model):
    """Data parallelism by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def trained(observed, model, make_batch=batch, autocast=nullcontext, after=lambda _: None):
    """The loop of most people; `after` is what they do between steps."""
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model):
            with autocast():
                loss = model(**make_batch(number)).loss
            loss.backward()
            update(optimizer)
        after(model)
        yield loss.item()


def ddp(observed):
    """Dropout draws random numbers in every step: whoever draws one more changes all that come."""
    return trained(observed, DistributedDataParallel(small_model(attention_dropout=0.1)))


def gradient_accumulation(observed):
    model = DistributedDataParallel(small_model())
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model):
            with model.no_sync():
                model(**batch(2 * number)).loss.backward()
            loss = model(**batch(2 * number + 1)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(optimizer)
        yield loss.item()


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


def deepspeed_zero(observed, *, stage):
    import deepspeed

    model = small_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    for number in range(STEPS):
        with observed(engine):
            loss = engine(**batch(number)).loss
            engine.backward(loss)
            engine.step()
        yield loss.item()


def accelerate(observed):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_model()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number in range(STEPS):
        with observed(model), accelerator.accumulate(model):
            loss = model(**batch(number)).loss
            accelerator.backward(loss)
            update(optimizer)
        yield loss.item()


def alst(observed):
    import deepspeed

    from tests.scripts import deepspeed_loop

    deepspeed.ops.__compatible_ops__ = {}  # compiles nothing for `inference_all_reduce`
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed_loop.train(partial(observed, strategy="deepspeed_ulysses"))


def transformers_trainer(observed):
    from tests.scripts import trainer_loop

    rows = [
        {"input_ids": ids, "labels": partly_ignored(ids)} for each in range(STEPS) for ids in tokens(each)
    ]
    return trainer_loop.train(
        observed, small_model(attention_dropout=0.1), rows,
        max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2,
    )  # fmt: skip


def partly_ignored(ids):
    """Labels of which another number counts in every row."""
    labels = ids.clone()
    labels[: int(ids[0]) % (LENGTH // 2)] = -100
    return labels


def trl_sft(observed):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from tests.scripts import trainer_loop

    words = {"<pad>": 0, "<end>": 1} | {str(number): number for number in range(2, VOCABULARY)}
    reader = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<end>")),
        pad_token="<pad>",  # noqa: S106  no password
        eos_token="<end>",  # noqa: S106  no password
    )
    each_row = [ids.tolist() for number in range(STEPS) for ids in tokens(number)]
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in each_row])
    return trainer_loop.train(
        observed, small_model(attention_dropout=0.1), rows, SFTTrainer, SFTConfig,
        {"processing_class": reader}, max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=LENGTH,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip


def fsdp2_context_parallel(observed):
    """torch's own, on a mesh of all ranks; on a CPU its operator needs two kernels."""
    flash_operator_for_cpu()
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
    """What a loop may call beside its training, with gradients and without, of tensors and of objects."""
    model = DistributedDataParallel(small_model())
    optimizer, ranks = adamw(model), dist.get_world_size()
    for number in range(STEPS):
        with observed(model):
            loss = model(**batch(number)).loss
            loss = torch.stack(all_gather(loss)).mean() + autograd_all_reduce(loss) * 0.1
            loss = loss + all_to_all_single(torch.empty(ranks), loss.expand(ranks).contiguous()).mean()
            loss = loss + reduce_scatter(torch.empty(()), [loss] * ranks) * 0.1
            loss.backward()
            update(optimizer)
            spread(loss.detach(), number, ranks)
        yield loss.item()


def spread(loss, number, ranks):
    """Every collective without a gradient; none changes anything."""
    rank, whole = dist.get_rank(), torch.arange(2.0 * ranks)
    parts = [*whole.split(2)]
    dist.scatter(torch.empty(2), parts if rank == 0 else None)
    dist.gather(loss, [torch.empty(()) for _ in range(ranks)] if rank == 0 else None)
    dist.reduce(loss.clone(), 0)
    dist.broadcast(loss.clone(), 0)
    dist.reduce_scatter_tensor(torch.empty(2), whole)
    dist.all_gather_into_tensor(torch.empty(ranks), loss.reshape(1))
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.barrier()
    dist.monitored_barrier()
    objects = [None] * ranks
    dist.all_gather_object(objects, {"step": number})
    dist.gather_object(number, objects if rank == 0 else None)
    dist.broadcast_object_list(objects, 0)
    dist.scatter_object_list([None], objects if rank == 0 else None)
    dist.all_reduce_coalesced([loss.clone(), loss.clone()])
    dist.all_gather_coalesced([[torch.empty(()), torch.empty(())] for _ in range(ranks)], [loss, loss])


def autocast_with_grad_scaler(observed):
    model = DistributedDataParallel(small_model())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        with observed(model):
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch(number)).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield loss.item()


def compiled(observed):
    return trained(observed, torch.compile(DistributedDataParallel(small_model())))


def squared_logits(logits):
    return (logits.float().exp().log1p().square() * 3).sum(-1).sqrt().mean()


def compiled_loss(observed):
    """Only what stands beside the model is compiled."""
    model, loss_of = DistributedDataParallel(small_model()), torch.compile(squared_logits)
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model):
            loss = loss_of(model(input_ids=tokens(number)).logits)
            loss.backward()
            update(optimizer)
        yield loss.item()


def compiled_in_place(observed):
    """Compiled inside of what wraps it, layer by layer."""
    model = small_model()
    for layer in model.model.layers:
        layer.compile()
    return trained(observed, DistributedDataParallel(model))


def evaluation_between_steps(observed):
    def evaluate(model):
        model.eval()
        with torch.inference_mode():
            loss = model(**batch(STEPS)).loss
            dist.all_reduce(loss)
        model.train()

    return trained(observed, DistributedDataParallel(small_model(attention_dropout=0.1)), after=evaluate)


def evaluation_in_a_step(observed):
    model = DistributedDataParallel(small_model(attention_dropout=0.1))
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model):
            loss = model(**batch(number)).loss
            loss.backward()
            update(optimizer)
            model.eval()
            with torch.inference_mode():
                loss = model(**batch(STEPS)).loss
            model.train()
        yield loss.item()


def padded_lengths(observed):
    def padded(number):
        ids = tokens(number, LENGTH + 8 * (number % 3) + 8 * dist.get_rank())
        mask = torch.ones_like(ids)
        mask[0, -4 * (number % 2 + 1) :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}

    return trained(observed, DistributedDataParallel(small_model()), padded)


def packed_documents(observed):
    def packed(number):
        ids, first = tokens(number)[:1], 10 + number
        positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        return {"input_ids": ids, "position_ids": positions[None], "labels": ids}

    return trained(observed, DistributedDataParallel(small_model()), packed)


class Rotation(torch.autograd.Function):
    """To the next rank, from the last one; gradients the other way."""

    @staticmethod
    def forward(ctx, x):
        return rotated(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return rotated(gradient, -1)


def rotated(x, by):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    ends = (dist.isend, sent, (rank + by) % ranks), (dist.irecv, received, (rank - by) % ranks)
    for request in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
        request.wait()
    return received


def ring_attention(module, query, key, value, attention_mask, *, scaling, **_):
    """Contiguous shards, each hop's part merged by its log-sum-exp."""
    rank, ranks, length = dist.get_rank(), dist.get_world_size(), query.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    own = torch.arange(length)
    out, lse = torch.zeros_like(query), torch.full((*query.shape[:3], 1), -1e30)
    for hop in range(ranks):
        later = own + (rank - hop) % ranks * length > (own + rank * length)[:, None]
        scores = (query @ key.mT * scaling).masked_fill(later, -1e30)
        part = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(lse, part)
        out = out * (lse - both).exp() + scores.softmax(-1) @ value * (part - both).exp()
        lse = both
        if hop < ranks - 1:
            key, value = Rotation.apply(key), Rotation.apply(value)
    return out.transpose(1, 2), None


def ring(observed):
    AttentionInterface.register("ring_of_ones_own", ring_attention)
    model = DistributedDataParallel(small_model("ring_of_ones_own"))
    optimizer = adamw(model)
    for number in range(STEPS):
        inputs, labels = shard_of(number, None)
        with observed(model, dist.group.WORLD):
            loss = cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())
            loss.backward()
            update(optimizer)
        yield loss.item()


def one_model(observed):
    """No wrapper and no collective: also what a single rank has."""
    return trained(observed, small_model("eager", attention_dropout=0.1))


def teacher_and_student(observed):
    student, teacher = DistributedDataParallel(small_model()), small_model().eval()
    optimizer = adamw(student)
    for number in range(STEPS):
        ids = tokens(number)
        with observed(student):
            with torch.no_grad():
                wanted = teacher(input_ids=ids).logits.softmax(-1)
            loss = kl_div(student(input_ids=ids).logits.log_softmax(-1), wanted + 1e-3 * number)
            loss.backward()
            update(optimizer)
        yield loss.item()


def contrastive(observed):
    model = small_model(attention_dropout=0.1)
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model):
            ids = tokens(number)
            views = [model.model(input_ids=ids).last_hidden_state.mean(1) for _ in range(2)]
            loss = -cosine_similarity(*views).mean()
            loss.backward()
            average_gradients(model)
            update(optimizer)
        yield loss.item()


class LossSpikeError(Exception):
    """A step that is not taken."""


def spike_caught_around_the_step(observed):
    model = DistributedDataParallel(small_model())
    optimizer = adamw(model)
    for number in range(STEPS):
        with suppress(LossSpikeError), observed(model):
            loss = model(**batch(number)).loss
            loss.backward()
            if number == SPIKE:
                optimizer.zero_grad()
                raise LossSpikeError("the loss is too high")
            update(optimizer)
        yield loss.item()


def spike_caught_in_the_step(observed):
    model = DistributedDataParallel(small_model())
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model), suppress(LossSpikeError):
            loss = model(**batch(number)).loss
            loss.backward()
            if number % 2:
                optimizer.zero_grad()
                raise LossSpikeError("the loss is too high")
            update(optimizer)
        yield loss.item()


def lbfgs(observed):
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3)

    def closure(number):
        optimizer.zero_grad()
        loss = model(**batch(number)).loss
        loss.backward()
        average_gradients(model)
        return loss

    for number in range(STEPS):
        with observed(model):
            loss = optimizer.step(partial(closure, number))
        yield loss.item()


def two_optimizers(observed):
    model = DistributedDataParallel(small_model())
    wide = [each for each in model.parameters() if each.ndim > 1]
    narrow = [each for each in model.parameters() if each.ndim == 1]
    optimizers = torch.optim.SGD(wide, lr=1e-2, momentum=0.9), torch.optim.AdamW(narrow, lr=1e-3)
    for number in range(STEPS):
        with observed(model):
            loss = model(**batch(number)).loss
            loss.backward()
            for optimizer in optimizers:
                update(optimizer)
        yield loss.item()


def in_a_thread(observed):
    losses = []
    thread = Thread(target=lambda: losses.extend(ddp(observed)))
    thread.start()
    thread.join()
    return losses


def copied_in_a_step(observed):
    """A mean of all weights so far is kept in a copy, and another copy is the best model."""
    model = DistributedDataParallel(small_model())
    optimizer, mean = adamw(model), None
    for number in range(STEPS):
        with observed(model):
            loss = model(**batch(number)).loss
            loss.backward()
            update(optimizer)
            mean = mean or copy.deepcopy(model.module)
            best = copy.deepcopy(model.module)
            for kept, new in zip(mean.parameters(), best.parameters(), strict=True):
                kept.data.lerp_(new, 0.1)
            with torch.no_grad():
                loss = mean(**batch(number)).loss + best(**batch(number)).loss
        yield loss.item()


def gradient_penalty(observed):
    model = small_model("eager")
    optimizer = adamw(model)
    for number in range(STEPS):
        ids = tokens(number)
        with observed(model):
            embedded = model.get_input_embeddings()(ids)
            loss = model(inputs_embeds=embedded, labels=ids).loss
            (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
            loss = loss + slope.square().sum()
            loss.backward()
            average_gradients(model)
            update(optimizer)
        yield loss.item()


def profiler_of_ones_own(observed):
    waiting = torch.profiler.schedule(wait=2, warmup=1, active=1)
    with torch.profiler.profile(schedule=waiting) as profiler:
        model = DistributedDataParallel(small_model())
        yield from trained(observed, model, after=lambda _: profiler.step())


def profiler_in_a_step(observed):
    waiting = torch.profiler.schedule(wait=2, warmup=1, active=1)
    model = DistributedDataParallel(small_model())
    optimizer = adamw(model)
    with torch.profiler.profile(schedule=waiting) as profiler:
        for number in range(STEPS):
            with observed(model):
                loss = model(**batch(number)).loss
                loss.backward()
                update(optimizer)
                profiler.step()
            yield loss.item()


def workers_that_load(observed):
    """Batches are fetched within a step, and in the first one the process that loads them is forked."""
    model = DistributedDataParallel(small_model())
    optimizer, batches = adamw(model), None
    rows = [ids for number in range(STEPS) for ids in tokens(number)]
    for _ in range(STEPS):
        with observed(model):
            batches = batches or iter(DataLoader(rows, batch_size=BATCH, num_workers=1))
            ids = next(batches)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            update(optimizer)
        yield loss.item()


def backward_outside(observed):
    model = DistributedDataParallel(small_model())
    optimizer = adamw(model)
    for number in range(STEPS):
        with observed(model):
            loss = model(**batch(number)).loss
        loss.backward()
        update(optimizer)
        yield loss.item()


LOOPS = {
    "alst": alst,
    "ddp": ddp,
    "gradient_accumulation": gradient_accumulation,
    "checkpointing_reentrant": partial(checkpointing, use_reentrant=True),
    "checkpointing": partial(checkpointing, use_reentrant=False),
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "zero1": partial(deepspeed_zero, stage=1),
    "zero2": partial(deepspeed_zero, stage=2),
    "zero3": partial(deepspeed_zero, stage=3),
    "accelerate": accelerate,
    "transformers_trainer": transformers_trainer,
    "trl_sft": trl_sft,
    "fsdp2_context_parallel": fsdp2_context_parallel,
    "all_collectives": all_collectives,
    "autocast_with_grad_scaler": autocast_with_grad_scaler,
    "compiled": compiled,
    "compiled_in_place": compiled_in_place,
    "compiled_loss": compiled_loss,
    "evaluation_between_steps": evaluation_between_steps,
    "evaluation_in_a_step": evaluation_in_a_step,
    "padded_lengths": padded_lengths,
    "packed_documents": packed_documents,
    "ring": ring,
    "one_model": one_model,
    "teacher_and_student": teacher_and_student,
    "contrastive": contrastive,
    "spike_caught_around_the_step": spike_caught_around_the_step,
    "spike_caught_in_the_step": spike_caught_in_the_step,
    "lbfgs": lbfgs,
    "two_optimizers": two_optimizers,
    "in_a_thread": in_a_thread,
    "copied_in_a_step": copied_in_a_step,
    "gradient_penalty": gradient_penalty,
    "profiler_of_ones_own": profiler_of_ones_own,
    "profiler_in_a_step": profiler_in_a_step,
    "workers_that_load": workers_that_load,
    "backward_outside": backward_outside,
}
