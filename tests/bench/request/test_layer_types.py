"""A configuration is refused exactly if transformers computes something else than plain attention for it."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.request.layer_types import PLAIN_FAMILIES, has_experts, layers_not_plain
from bench.training.text_model import text_config

TOKENS = 48
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}


def plain(_module, q, k, v, _mask, **_):
    """Compute plain causal attention, as strategies do."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2), None


def nothing(_module, q, _k, v, _mask, **_):
    return torch.zeros(*q.shape[:-1], v.shape[-1]).transpose(1, 2), None


@pytest.fixture(autouse=True)
def _attention_of_ours():
    ours = {"plain": plain, "nothing": nothing}
    for name, function in ours.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    yield
    for name in ours:
        del ALL_ATTENTION_FUNCTIONS[name]


def logits(numbers, attention, ids):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**numbers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() > 1 else 0.0)
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation = attention
        return model(input_ids=ids, use_cache=False).logits


def differs(numbers):
    """Return whether the model's logits differ from those with plain causal attention in every layer.

    It is also True if tokens are mixed outside of attention, and if transformers has no such model.
    """
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, -2] = 3 + (other[0, -2] - 2) % 94
    try:
        own = logits(numbers, "eager", ids)
    except (KeyError, ValueError, StrictDataclassFieldValidationError):
        return True
    without = [logits(numbers, "nothing", each)[0, -1] for each in (ids, other)]
    return not torch.equal(own, logits(numbers, "plain", ids)) or not torch.equal(*without)


def numbers_of(family, **keys):
    return {"model_type": family, **SMALL, **keys}


def unplain(numbers, tokens=TOKENS):
    return layers_not_plain(text_config(AutoConfig.for_model(**numbers)), tokens)


REFUSED = {
    "the window of Mistral": (("mistral", {"sliding_window": 47}), "layers have sliding_window=47"),
    "a window of the last layer": (
        ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
        "1 of 2 layers are sliding_attention (sliding_window=12)",
    ),
    "a window of a listed layer": (
        ("qwen3", {"use_sliding_window": True, "sliding_window": 40,
                   "layer_types": ["full_attention", "sliding_attention"]}),
        "1 of 2 layers are sliding_attention (sliding_window=40)",
    ),
    "a listed window that is off": (
        ("qwen3", {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}),
        "1 of 2 layers are sliding_attention",
    ),
    "a listed layer of another kind": (
        ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}), "1 of 2 layers are linear_att",
    ),
    "no causal mask": (("llama", {"is_causal": False}), "no causal mask (is_causal=false)"),
    "another family's window": (("starcoder2", {"sliding_window": 16}), "layers have sliding_window=16"),
    "Gemma 2's window": (
        ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None,
                    "layer_types": ["sliding_attention", "full_attention"]}),
        "1 of 2 layers are sliding_attention (sliding_window=16)",
    ),
    "chunks": (
        ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 2, "no_rope_layers": [1, 1],
                         "layer_types": ["chunked_attention"] * 2}),
        "2 of 2 layers are chunked_attention (attention_chunk_size=8)",
    ),
    "linear attention": (
        ("qwen3_next", {"full_attention_interval": 2, "linear_key_head_dim": 16, "num_experts": 2,
                        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "num_experts_per_tok": 1,
                        "linear_num_value_heads": 4, "moe_intermediate_size": 32}),
        "1 of 2 layers are linear_attention",
    ),
    "a state space": (("falcon_h1", {**MAMBA, "mamba_d_ssm": 128}), "layers have a state space"),
    "a recurrent unit": (
        ("recurrent_gemma", {"lru_width": 64, "attention_window_size": 64, "block_types": ["recurrent"] * 2}),
        "2 of 2 layers are recurrent",
    ),
    "two head dimensions": (
        ("gemma4_text", {"global_head_dim": 32, "sliding_window": 64}), "layers differ from one another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_layers_differ_from_plain_attention(case):
    (family, keys), reason = REFUSED[case]
    numbers = numbers_of(family, **keys)
    assert reason in "; ".join(unplain(numbers))
    assert differs(numbers)


CHUNKS = {"num_local_experts": 2, "no_rope_layers": [1, 1], "layer_types": ["chunked_attention"] * 2}
LISTED = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}
PLAIN = [
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": TOKENS}),
    ("llama", {"sliding_window": 16, "use_sliding_window": True}),
    ("qwen2", {"sliding_window": 16, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16}),
    ("qwen3", LISTED),
    ("llama", {"layer_types": ["sliding_attention", "linear_attention"]}),
    ("llama4_text", {"attention_chunk_size": 64, **CHUNKS}),
]
"""Configurations with windows that are off or as long as the sequence, or with keys that are ignored."""
KEYS_OF_OTHER_FAMILIES = {
    "attn_logit_softcapping": 5.0, "alibi": True, "attention_multiplier": 0.01, "query_pre_attn_scalar": 1,
    "attention_chunk_size": 8, "full_attention_interval": 2, "mamba_d_state": 4, "conv_L_cache": 3,
    "global_head_dim": 8, "hybrid_override_pattern": "M*", "num_local_experts": 8,
}  # fmt: skip


@pytest.mark.parametrize(("family", "keys"), PLAIN)
def test_plain_layers_are_not_refused(family, keys):
    numbers = numbers_of(family, **keys)
    assert unplain(numbers) == []
    assert not differs(numbers)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_keys_of_other_families_do_not_refuse_a_plain_family(family):
    numbers = numbers_of(family, sliding_window=None, **KEYS_OF_OTHER_FAMILIES)
    assert unplain(numbers) == []
    assert not has_experts(numbers)
    assert not differs(numbers)


def test_default_window_of_mistral_is_that_of_transformers():
    numbers = numbers_of("mistral")
    assert unplain(numbers, 4096) == []
    assert unplain(numbers, 4097) == ["layers have sliding_window=4096"]
