"""DeepSpeed's Ulysses for Hugging Face models, driven as its tutorial does; every step observed."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

SEQ_LEN, VOCABULARY, IGNORED = 512, 97, -100
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def sequence(number):
    tokens = torch.randint(VOCABULARY, (SEQ_LEN,), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": torch.arange(SEQ_LEN)}


def mean_over_tokens(loss, labels, group):
    """The mean over all ranks' tokens of their own means, as the tutorial has it."""
    losses = all_gather(loss, group=group)
    counts = all_gather((labels != IGNORED).sum(), group=group)
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def train(observed):
    """The loss of every step; `observed(model, group)` is the context around it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", dist.get_world_size(), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, mpu=mpu)
    group = mpu.get_sequence_parallel_group()
    own = list(map(sequence, range(dist.get_rank(), 40, dist.get_world_size())))
    shards = UlyssesSPDataLoaderAdapter(
        torch.utils.data.DataLoader(own, batch_size=1),
        sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=group,
        sp_world_size=mpu.get_sequence_parallel_world_size(),
        device=engine.device,
    )
    losses = []
    for batch in shards:
        labels = batch.pop("shift_labels")
        with observed(engine, group) as step:
            logits = engine(**batch).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            mean = mean_over_tokens(loss, labels, group)
            if step is not None:
                step.loss(mean, (labels != IGNORED).sum())
            engine.backward(mean)
            engine.step()
        losses.append(loss.item())
    return losses
