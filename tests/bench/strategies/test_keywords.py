"""Keywords of a layer that ask for more than plain causal attention are refused at its first call."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.ranks.log import RefusedError
from bench.strategies import STRATEGIES, load_strategy_class
from tests.support.cells import make_cell

NUMBERS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None,
}  # fmt: skip
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
UNSUPPORTED = {
    "window": ("qwen3", {**WINDOW, "use_sliding_window": True}, r"sliding_window=4"),
    "sinks": (
        "gpt_oss",
        {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
        r"s_aux=a tensor of \(4,\)",
    ),
    "scale": ("granite", {"attention_multiplier": 1.0}, "scaling=1.0"),
    "dropout": ("qwen2", {"attention_dropout": 0.1}, "dropout=0.1"),
}


def train_once(family, numbers, mask=None):
    """Run one forward of a tiny model in training mode with the attention of `local`."""
    cell = make_cell("strategy=local", "dtype=fp32", "kernel=math")
    strategy = load_strategy_class("local")(cell, SimpleNamespace(world_size=1), STRATEGIES["local"])
    with strategy.install() as wiring:
        config = AutoConfig.for_model(family, **{**NUMBERS, **numbers})
        config._attn_implementation = wiring.attention_name
        AutoModelForCausalLM.from_config(config).train()(torch.arange(8)[None], attention_mask=mask)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_attention_keyword_is_refused_by_name(case):
    family, numbers, keyword = UNSUPPORTED[case]
    with pytest.raises(RefusedError, match=f"calls attention with .*{keyword}.*plain causal attention"):
        train_once(family, numbers)


def test_attention_mask_is_refused():
    """transformers drops a mask of one row per sequence, and passes on a mask of S x S."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with pytest.raises(RefusedError, match=r"attention_mask=a tensor of \(1, 1, 8, 8\)"):
        train_once("qwen3", {}, mask)
