"""Faults that begin beyond the 1,024 tokens of the short checks."""

import torch
from torch.nn.functional import linear

import bench.strategies.ring.attention as ring
from bench.measure.objective.section import MAX_TOKENS
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.loss import ModelWithLoss
from tests.support.faults.classes.tampering import change_the_model, is_long, replace_attention, wrap


def scale_the_scores(job):
    """Make scores 5 % too large, which is within the floor of a comparison by maxima."""

    def scaled(plain, self, q, k, v, causal):
        return plain(self, q * 1.05, k, v, causal=causal)

    replace_attention(job, scaled, is_long)


def forget_the_mask(job):
    replace_attention(job, lambda plain, self, *qkv: plain(self, *qkv[:3], causal=False), is_long)


def _enlarge_gradients(job, by, *, of_keys):
    def enlarged(plain, self, q, k, v, causal):
        k, v = k.view_as(k), v.view_as(v)
        (k if of_keys else v).register_hook(lambda gradient: gradient * by)
        return plain(self, q, k, v, causal=causal)

    replace_attention(job, enlarged, is_long)


def enlarge_the_gradient_of_the_keys(job):
    _enlarge_gradients(job, 3, of_keys=True)


def enlarge_the_gradient_of_the_values(job):
    _enlarge_gradients(job, 3, of_keys=False)


def enlarge_the_gradient_of_the_keys_by_a_tenth(job):
    """Make gradients of keys a tenth too large, which in 16 bit no identity distinguishes from rounding."""
    _enlarge_gradients(job, 1.1, of_keys=True)


def lose_a_hop_of_the_keys_of_one_head(job):
    """Drop the contribution of rank 0's queries to the other rank's key gradient in the last KV head."""

    def backward(plain, kernel, dout, q, k, *rest, causal, scale):
        dq, dk, dv = plain(kernel, dout, q, k, *rest, causal=causal, scale=scale)
        is_long = max(q.shape[2], k.shape[2]) * job.cell.sp_degree > MAX_TOKENS
        if is_long and not causal and job.rank == 0:
            dk[:, -1] = 0
        return dq, dk, dv

    wrap(ring, "kernel_backward", backward)


def cut_the_loss_of_rank_1(job):
    """Ignore the second half of rank 1's labels after the model's input was recorded."""

    def built(plain, self, *words):
        plain(self, *words)
        whole = self.token_losses

        def cut(head, hidden, labels):
            if len(labels) * job.cell.sp_degree > MAX_TOKENS and job.rank == 1:
                labels = labels.clone()
                labels[len(labels) // 2 :] = IGNORED_LABEL
            return whole(head, hidden, labels)

        self.token_losses = cut

    wrap(ModelWithLoss, "__init__", built)


def feed_other_tokens_than_noted(job):
    """Embed each token's successor after the model's input was recorded."""

    def embed(plain, ids):
        is_long = ids.shape[1] * job.cell.sp_degree > MAX_TOKENS
        return plain(ids.roll(-1, dims=1) if is_long else ids)

    change_the_model(lambda model: wrap(model.model.model.embed_tokens, "forward", embed))


def lose_a_quarter_of_the_embedding_gradient(job):
    """Lose the gradient of the embedding at every fourth token, in long sequences."""

    def embed(plain, ids):
        out = plain(ids)
        if ids.shape[1] * job.cell.sp_degree <= MAX_TOKENS:
            return out
        return torch.where(torch.arange(ids.shape[1])[:, None] % 4 > 0, out, out.detach())

    change_the_model(lambda model: wrap(model.model.model.embed_tokens, "forward", embed))


def exchange_the_ends_of_shards(job):
    """Exchange the keys of a shard's first and last token, in long sequences."""

    def exchanged(plain, self, q, k, v, causal):
        return plain(self, q, torch.cat([k[:, :, -1:], k[:, :, 1:-1], k[:, :, :1]], dim=2), v, causal=causal)

    replace_attention(job, exchanged, is_long)


def train_a_matrix_on_the_tokens_of_rank_0(job):
    """Let the averaged gradient of one matrix hold the tokens of rank 0 alone, in long sequences."""
    factor = job.cell.sp_degree if job.rank == 0 else 0

    def change(model):
        module = model.model.model.layers[0].mlp.down_proj

        def forward(plain, hidden):
            if hidden.shape[1] * job.cell.sp_degree <= MAX_TOKENS:
                return plain(hidden)
            weight = module.weight
            return linear(hidden, factor * weight + ((1 - factor) * weight).detach())

        wrap(module, "forward", forward)

    change_the_model(change)
