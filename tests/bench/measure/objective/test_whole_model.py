"""A step computed layer by layer has the loss and gradients of autograd on the whole model."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measure.objective.coverage import coverages
from bench.measure.objective.gradient_noise import ExactGradient, gradient_errors
from bench.measure.objective.whole_model import CONTROLS, EXACT, WholeModel
from bench.measure.parity.exact import PLAIN_NAME, plain_attention_installed
from bench.ranks.log import StepPhase
from bench.training.data import open_data
from bench.training.loss import ModelWithLoss
from bench.training.models import build_model, sum_embedding_gradient_in_float32
from tests.support.cells import make_cell

CPU = torch.device("cpu")
TOKENS = 64
ROUNDED = "control 2"


NANO = ("model=qwen3_nano", "model.num_layers=5")


def trainer_of(*words, model=NANO):
    """Return a stand-in for a training loop with two sequences per step."""
    cell = make_cell("strategy=local", *model, "batch=2", "data=synthetic", *words)
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


def at_once(trainer, sequences, dtype, *, autocast=False):
    """Return loss and gradients of transformers' own model, with one backward per sequence."""
    cell, valid = trainer.cell, sum(int((batch.labels != -100).sum()) for batch in sequences)
    with plain_attention_installed() as attention:
        attention.rounding = CONTROLS[ROUNDED]
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
    loss, expected = at_once(trainer, sequences, dtype, autocast=autocast)
    rounded_loss, gradients = results[ROUNDED]
    assert rounded_loss == pytest.approx(loss, rel=1e-12)
    unequal = [name for name, x in expected.items() if not torch.equal(x, gradients[name])]
    assert unequal == []


def test_controls_have_independent_errors(tmp_path):
    """With the sum over the keys as the only difference, errors of the scale correlate by 0.57 and 0.75."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    for layer in model.model.layers:  # as sharp as trained attention
        layer.self_attn.q_proj.weight.data *= 8
        layer.self_attn.k_proj.weight.data *= 8
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    words = "model=checkpoint", f"model.path={tmp_path}"
    _, results = layer_by_layer(trainer_of("dtype=bf16", "engine=ddp", model=words))
    exact = {name: ExactGradient.from_tensor(gradient) for name, gradient in results[EXACT][1].items()}
    differences = [
        {name: x.difference(results[key][1][name]) for name, x in exact.items()} for key in CONTROLS
    ]
    scales = [[error.scale for error in gradient_errors(x, 2**-8).values()] for x in differences]
    assert torch.corrcoef(torch.tensor(scales))[0, 1:].max() < 0.4
