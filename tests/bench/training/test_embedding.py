"""On a CPU the embedding's gradient is summed in float32, so that it errs no more than any other does."""

import numpy as np
import pytest
import torch
from torch.nn.functional import embedding

from bench.training.models import WideSumEmbedding
from tests.support.cells import make_cell
from tests.support.many_cells import gradients_of

EMBEDDING = "model.model.embed_tokens.weight"
LONG = ("seq_len=8k", "measure.gradients=true")
EXACT = ("strategy=local", "engine=ddp", "dtype=fp32")
BF16 = [("local", "ddp"), ("ulysses", "fsdp2"), ("ulysses", "zero3")]
UNTIED = ("model=qwen3_nano", "model.tied_embeddings=false")
CASES = {
    **{
        f"{strategy} under {engine}": ((f"strategy={strategy}", f"engine={engine}"), ())
        for strategy, engine in BF16
    },
    "with a head of its own": (("strategy=local", "engine=zero3"), UNTIED),
}
MARGIN = 1.5


@pytest.fixture(scope="module")
def gradients(launcher, tmp_path_factory):
    """Of a long step of each case and, in float32, of each model."""
    cells = {name: make_cell(*LONG, *words, *model) for name, (words, model) in CASES.items()}
    cells |= {str(model): make_cell(*LONG, *EXACT, *model) for model in ((), UNTIED)}
    return gradients_of(launcher, tmp_path_factory.mktemp("cells"), cells)


@pytest.mark.parametrize("case", CASES)
def test_in_bf16_the_embeddings_gradient_errs_hardly_more_than_the_worst_other(gradients, case):
    found, exact = gradients[case], gradients[str(CASES[case][1])]
    assert isinstance(found, dict), found
    errors = {
        name: np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])
        for name in exact
        if name.startswith("model.")
    }
    assert errors.pop(EMBEDDING) < MARGIN * max(errors.values())


def summed(table_VH, ids, upstream_BSH, padding_idx=None):
    """The gradient of a table of this dtype, by our embedding."""
    layer = WideSumEmbedding(*table_VH.shape, padding_idx=padding_idx, _weight=table_VH.clone())
    out = layer(ids)
    assert torch.equal(out, embedding(ids, table_VH))
    out.backward(upstream_BSH.to(table_VH.dtype))
    return layer.weight.grad


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_sum_is_rounded_once_whatever_the_dtype(dtype, padding_idx):
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (2, 4096))
    upstream_BSH = torch.randn(2, 4096, 8).to(dtype)
    found = summed(torch.randn(5, 8, dtype=dtype), ids, upstream_BSH, padding_idx)
    exact = torch.zeros(5, 8, dtype=torch.float64)
    counted = ids != padding_idx if padding_idx is not None else torch.ones_like(ids, dtype=torch.bool)
    exact.index_add_(0, ids[counted], upstream_BSH[counted].double())
    assert found.dtype == dtype
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * 100)
    assert (found.double() - exact).norm() <= rounding * exact.norm()
