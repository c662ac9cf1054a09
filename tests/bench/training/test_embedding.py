"""The embedding's gradient is summed in float32 on a CPU, so that its error is near that of others."""

import numpy as np
import pytest
import torch
from torch.nn.functional import embedding

from bench.training.models import WideSumEmbedding
from tests.support.cells import make_cell
from tests.support.many_cells import gradients_of

EMBEDDING = "model.model.embed_tokens.weight"
LONG = ("seq_len=8k",)
EXACT = ("strategy=local", "engine=ddp", "dtype=fp32")
BF16 = [("local", "ddp"), ("ulysses", "fsdp2"), ("ulysses", "zero3")]
UNTIED = ("model=qwen3_nano", "model.tied_embeddings=false")
CASES = {
    **{
        f"{strategy} under {engine}": ((f"strategy={strategy}", f"engine={engine}"), ())
        for strategy, engine in BF16
    },
    "untied": (("strategy=local", "engine=zero3"), UNTIED),
}
MARGIN = 1.5


@pytest.fixture(scope="module")
def gradients(launcher, tmp_path_factory):
    """Gradients of a long step of each case, and of each model in float32."""
    cells = {name: make_cell(*LONG, *words, *model) for name, (words, model) in CASES.items()}
    cells |= {str(model): make_cell(*LONG, *EXACT, *model) for model in ((), UNTIED)}
    return gradients_of(launcher, tmp_path_factory.mktemp("cells"), cells)


@pytest.mark.parametrize("case", CASES)
def test_bf16_embedding_gradient_error_is_near_that_of_others(gradients, case):
    actual, exact = gradients[case], gradients[str(CASES[case][1])]
    assert isinstance(actual, dict), actual
    errors = {
        name: np.linalg.norm(actual[name] - exact[name]) / np.linalg.norm(exact[name])
        for name in exact
        if name.startswith("model.")
    }
    assert errors.pop(EMBEDDING) < MARGIN * max(errors.values())


def embedding_gradient(table_VH, ids, upstream_BSH, padding_idx=None):
    """Return the gradient of a table by `WideSumEmbedding`."""
    layer = WideSumEmbedding(*table_VH.shape, padding_idx=padding_idx, _weight=table_VH.clone())
    out = layer(ids)
    assert torch.equal(out, embedding(ids, table_VH))
    out.backward(upstream_BSH.to(table_VH.dtype))
    return layer.weight.grad


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_wide_sum_embedding_rounds_the_sum_once(dtype, padding_idx):
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (2, 4096))
    upstream_BSH = torch.randn(2, 4096, 8).to(dtype)
    actual = embedding_gradient(torch.randn(5, 8, dtype=dtype), ids, upstream_BSH, padding_idx)
    exact = torch.zeros(5, 8, dtype=torch.float64)
    counted = ids != padding_idx if padding_idx is not None else torch.ones_like(ids, dtype=torch.bool)
    exact.index_add_(0, ids[counted], upstream_BSH[counted].double())
    assert actual.dtype == dtype
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * 100)
    assert (actual.double() - exact).norm() <= rounding * exact.norm()
