"""Training script as a user would write it, with its own attention; it makes mistakes on request."""

import time
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, kl_div, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

import bench

STATED = (
    *("stated", "own_means", "added_up", "prompt_alone", "doubled", "distilled", "clips_own", "skipped"),
    *("packed", "packed_without_mask", "padded", "padded_forgets_a_key", "left_padded"),
    *("hidden_documents", "sliced_inside"),
)
"""Variants that state their loss."""
DOCUMENTS, TEXT, PADDING = (100, 212, 200), 498, 20
"""Lengths of packed documents, of a text that padding follows, and of padding before a text."""
SEQ_LEN, VOCABULARY, STEPS, RAISES_IN, HANG_S = 512, 97, 16, 4, 9.0
NUMBERS = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def positions_of(mistake):
    """Return the positions of a whole sequence, [1, T]: they restart in packed documents and in padding."""
    if mistake == "skipped":
        return torch.cat([torch.arange(SEQ_LEN // 4), torch.arange(SEQ_LEN // 4, SEQ_LEN) + 3000])[None]
    if mistake == "left_padded":
        return torch.arange(-PADDING, SEQ_LEN - PADDING)[None]
    lengths = (SEQ_LEN,)
    if mistake and mistake.startswith("packed"):
        lengths = DOCUMENTS
    if mistake and mistake.startswith("padded"):
        lengths = (TEXT, SEQ_LEN - TEXT)
    return torch.cat([torch.arange(length) for length in lengths])[None]


def hidden_keys(mistake):
    """Return the mask of keys that packing, or a mistake with padding, hides from each query, [T, T]."""
    hidden = torch.zeros(SEQ_LEN, SEQ_LEN, dtype=torch.bool)
    if mistake == "left_padded":
        hidden[:, :PADDING] = ~torch.eye(SEQ_LEN, dtype=torch.bool)[:, :PADDING]
    if mistake in ("packed", "hidden_documents"):
        numbers = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
        hidden = numbers[:, None] != numbers
    if mistake == "padded_forgets_a_key":
        hidden[TEXT - 1, TEXT - 2] = True
    return hidden


def attention_over_gathered_keys(gather, hidden):
    """Own queries against the keys and values of all ranks, contiguous shards; for transformers' table."""

    def attention(module, query, key, value, attention_mask, *, scaling, **_):
        rank, ranks, tokens = dist.get_rank(), dist.get_world_size(), query.shape[2]
        key, value = (gather(x.contiguous(), 2, dist.group.WORLD) for x in (key, value))
        queries = torch.arange(tokens) + rank * tokens
        seen = (torch.arange(ranks * tokens) <= queries[:, None]) & ~hidden[queries]
        out = scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    return attention


def gather_as_constants(x, dim, group):
    """All ranks' shards, of which only the own one is given its gradient."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, x.detach(), group=group)
    shards[dist.get_rank(group)] = x
    return torch.cat(shards, dim)


def small_model(mistake):
    gather = gather_as_constants if mistake == "no_gradient_to_others" else all_gather_tensor_autograd
    AttentionInterface.register("gathered_keys", attention_over_gathered_keys(gather, hidden_keys(mistake)))
    torch.manual_seed(0)
    attention = "sdpa" if mistake == "no_sampler" else "gathered_keys"
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    more = window if mistake == "ignored_window" else {}
    model = Qwen3ForCausalLM(Qwen3Config(**NUMBERS, **more, attn_implementation=attention))
    if mistake == "sliced_inside":
        slice_inside(model)
    if mistake == "positions_counted_inside":
        plain = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, _: plain(x, torch.arange(x.shape[1])[None])
    return model


def slice_inside(model):
    """Make the model take a shard of whole sequences after its embedding, as vision-language models do."""
    mine = slice(dist.get_rank() * SEQ_LEN // 2, (dist.get_rank() + 1) * SEQ_LEN // 2)
    model.model.embed_tokens.register_forward_hook(lambda _module, _args, embedded: embedded[:, mine])
    model.model.rotary_emb.register_forward_pre_hook(lambda _module, args: (args[0], args[1][:, mine]))


def shard_of(step, mistake):
    """This rank's part of a step's sequence: inputs of the model, and the labels that belong to them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(VOCABULARY, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    length = SEQ_LEN // ranks
    mine = slice(rank * length, (rank + 1) * length)
    inputs = {"input_ids": tokens[:, :-1][:, mine], "position_ids": positions_of(mistake)[:, mine]}
    if mistake in ("same_tokens", "same_tokens_in_place"):
        inputs["input_ids"] = tokens[:, :length]
    if mistake in ("same_positions", "same_tokens"):
        inputs["position_ids"] = torch.arange(length)[None]
    if mistake == "labels_shifted_in_shards":
        inputs["labels"] = inputs["input_ids"]
    if mistake in ("sliced_inside", "no_sampler"):
        inputs = {"input_ids": tokens[:, :-1], "position_ids": torch.arange(SEQ_LEN)[None]}
    return inputs, tokens[:, 1:] if mistake == "no_sampler" else tokens[:, 1:][:, mine]


def loss_of(logits, labels, mistake):
    """Return the loss and the number of counted tokens; a third of rank 0's tokens do not count."""
    if mistake not in STATED:
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()
    labels = labels.clone()
    if mistake.startswith("padded") and dist.get_rank() == dist.get_world_size() - 1:
        labels[:, TEXT - 1 - SEQ_LEN :] = -100
    if dist.get_rank() == 0 and not mistake.startswith("packed"):
        prompt = labels.shape[1] if mistake in ("prompt_alone", "doubled") else labels.shape[1] // 3
        labels[:, :prompt] = -100
    valid = (labels != -100).sum()
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    if mistake == "own_means":
        return loss / valid, valid
    of_all = valid.clone()
    dist.all_reduce(of_all)
    if mistake == "distilled":
        targets = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)).softmax(-1)
        loss = kl_div(logits.log_softmax(-1), targets, reduction="sum")
    own_ranks = {"added_up": 1, "clips_own": 1, "doubled": 2 * dist.get_world_size()}
    ranks = own_ranks.get(mistake, dist.get_world_size())
    return loss * ranks / of_all, valid


def combine_gradients(model, mistake):
    """Add up or clip gradients in the loops that do so themselves."""
    if mistake in ("clips_own", "doubled"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if mistake in ("added_up", "clips_own"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def interrupt(step, mistake):
    """Raise an error on all ranks, from the code of a library, or keep the others waiting for rank 1."""
    if (step, mistake) == (RAISES_IN, "raises"):
        failed = Future()
        failed.set_exception(RuntimeError("a step that raises"))
        failed.result()
    if (step, mistake, dist.get_rank()) == (RAISES_IN, "hangs", 1):
        time.sleep(HANG_S)


def train(folder, mistake=None, steps=STEPS, report=False, timed_steps=6):
    """The loss of every step, as this rank computed it."""
    model = small_model(mistake)
    if mistake not in ("gradients_of_ones_own", "added_up", "clips_own"):
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group = None if mistake in ("no_group", "no_sampler") else dist.group.WORLD
    losses = []
    for step in range(steps):
        inputs, labels = shard_of(step, mistake)
        with bench.observe(
            model, group, folder=folder, strategy="gathered_keys", steps=timed_steps, report=report
        ) as observed:
            interrupt(step, mistake)
            output = model(**inputs)
            loss, valid = loss_of(output.logits, labels, mistake)
            if mistake == "labels_shifted_in_shards":
                loss = output.loss
            if mistake == "loss_of_all_ranks":  # none, only the way of DeepSpeed's tutorial
                loss = sum(all_gather(loss, group=group))
            if observed is not None and mistake in STATED:
                observed.loss(loss, valid)
            loss.backward()
            combine_gradients(model, mistake)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
