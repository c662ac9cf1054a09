"""Faults in the rotary positions of one layer or rank, in sequences longer than those of short checks."""

import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from bench.measure.objective.section import MAX_TOKENS
from tests.support.faults.classes.tampering import change_the_model, wrap


def rotate_the_second_layer_one_off(job):
    """Give the second layer the cos and sin of each token's predecessor."""
    _replace_pair_of_the_second_layer(job, lambda _, pair, __: _one_off(*pair))


def rotate_the_second_layer_by_interpolated_positions(job):
    """Give the second layer the cos and sin of positions that are one percent smaller."""
    _replace_pair_of_the_second_layer(job, lambda rotary, pair, ids: rotary.forward(pair[0], 0.99 * ids))


def rotate_one_off_on_rank_1(job):
    """Rotate by the cos and sin of each token's predecessor in all layers of rank 1."""
    _rotate_one_off(job, lambda: job.rank == 1)


def rotate_one_off_while_recomputing(job):
    """Rotate by the cos and sin of each token's predecessor when backward computes a layer again."""
    _rotate_one_off(job, lambda: torch._C._current_graph_task_id() >= 0)


def _one_off(cos, sin):
    return cos.roll(1, dims=-2), sin.roll(1, dims=-2)


def _is_long(job, cos):
    return cos.shape[-2] * job.cell.sp_degree > MAX_TOKENS


def _replace_pair_of_the_second_layer(job, pair_of):
    def change(model):
        decoder = model.model.model

        def forward(plain, *, position_embeddings, position_ids, **words):
            if _is_long(job, position_embeddings[0]):
                position_embeddings = pair_of(decoder.rotary_emb, position_embeddings, position_ids)
            return plain(position_embeddings=position_embeddings, position_ids=position_ids, **words)

        wrap(decoder.layers[1].self_attn, "forward", forward)

    change_the_model(change)


def _rotate_one_off(job, is_wrong):
    def rotate(plain, q, k, cos, sin):
        return plain(q, k, *(_one_off(cos, sin) if _is_long(job, cos) and is_wrong() else (cos, sin)))

    for family in (modeling_llama, modeling_qwen2, modeling_qwen3):
        wrap(family, "apply_rotary_pos_emb", rotate)
