"""A step computed layer by layer has the loss and gradients of autograd on the whole model."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from bench.measure.objective.coverage import coverages
from bench.measure.objective.whole_model import EXACT, WholeModel
from bench.measure.parity.exact import PLAIN_NAME, plain_attention_installed
from bench.ranks.log import StepPhase
from bench.training.data import open_data
from bench.training.loss import ModelWithLoss
from bench.training.models import build_model, sum_embedding_gradient_in_float32
from tests.support.cells import make_cell

CPU = torch.device("cpu")
TOKENS = 64
ROUNDED = "control 2"


def trainer_of(*words):
    """Return a stand-in for a training loop with two sequences per step and five layers."""
    cell = make_cell(
        "strategy=local", "model=qwen3_nano", "model.num_layers=5", "batch=2", "data=synthetic", *words
    )
    return SimpleNamespace(
        cell=cell,
        data=open_data(cell, CPU, uncounted_tokens=TOKENS // 3),
        phase=StepPhase(),
    )


def layer_by_layer(trainer):
    """Return the sequences of a step, and loss and all gradients of each computation."""
    with plain_attention_installed() as attention:
        model, by_name = WholeModel(trainer, TOKENS, CPU, attention), {}
        whole, *_ = coverages(trainer.cell)
        for name, gradients in model.gradients(whole):
            by_name.setdefault(name, {}).update(gradients)
    results = {name: (model.losses[name].mean, gradients) for name, gradients in by_name.items()}
    return model.sequences, results


def at_once(trainer, sequences, dtype, *, autocast=False, key_parts=1):
    """Return loss and gradients of transformers' own model, with one backward per sequence."""
    cell, valid = trainer.cell, sum(int((batch.labels != -100).sum()) for batch in sequences)
    with plain_attention_installed() as attention:
        attention.key_parts = key_parts
        plain = build_model(cell.model, attention_name=PLAIN_NAME, max_positions=cell.seq_len, seed=cell.seed)
        sum_embedding_gradient_in_float32(plain)
        for parameter in plain.parameters():  # not buffers: rotary frequencies stay in float32
            parameter.data = parameter.data.to(dtype)
        model, total, sums = ModelWithLoss(plain.train(), "untiled", StepPhase()), 0.0, {}
        for batch in sequences:
            attention.documents = batch.documents
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                hidden = plain.model(
                    batch.input_ids, position_ids=batch.position_ids, use_cache=False
                ).last_hidden_state
                logits = plain.lm_head(hidden).flatten(0, 1)
                logits = logits if logits.dtype == torch.float64 else logits.float()
                losses = cross_entropy(logits, batch.labels.flatten(), reduction="none")
                loss = (losses.double() / valid).sum()
                loss.backward()
            total += float(loss)
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                wide = grad if grad.dtype == torch.float64 else grad.float()
                sums[name] = sums.get(name, 0) + wide
            model.zero_grad()
    return total, sums


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.family=qwen2", "model.attention_bias=true", "model.tied_embeddings=false"),
        ("model.family=llama", "data.packing=documents"),
        ("model.family=mistral", "checkpointing=true"),
    ],
)
def test_exact_gradients_equal_autograd_on_the_whole_model(words):
    trainer = trainer_of("dtype=fp32", *words)
    sequences, results = layer_by_layer(trainer)
    loss, expected = at_once(trainer, sequences, torch.float64)
    exact_loss, gradients = results[EXACT]
    assert exact_loss == pytest.approx(loss, rel=1e-12)
    assert gradients.keys() == expected.keys()
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    far = [name for name, x in expected.items() if (gradients[name] - x).norm() > 1e-12 * whole]
    assert far == []


@pytest.mark.parametrize("autocast", [False, True])
def test_rounded_gradients_equal_autograd_to_the_bit(autocast):
    trainer = trainer_of("dtype=bf16", f"engine={'ddp' if autocast else 'fsdp2'}")
    sequences, results = layer_by_layer(trainer)
    dtype = torch.float32 if autocast else torch.bfloat16
    loss, expected = at_once(trainer, sequences, dtype, autocast=autocast, key_parts=2)
    rounded_loss, gradients = results[ROUNDED]
    assert rounded_loss == pytest.approx(loss, rel=1e-12)
    unequal = [name for name, x in expected.items() if not torch.equal(x, gradients[name])]
    assert unequal == []
