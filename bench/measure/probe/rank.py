"""The probe of a cell: its own attention in a cut of its model, one token changed after another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bench.attention.documents import Documents
from bench.config import LOW_PRECISION, Cell, DataConfig
from bench.measure.parity.exact import PLAIN_NAME, plain_attention_installed
from bench.measure.parity.rank import parity_len
from bench.measure.parity.section import limit_of
from bench.measure.probe.leaks import Places, changes_of, leaks, parts_of
from bench.measure.probe.section import EXPERIMENT, Moved, ProbeSection, why_wrong
from bench.measure.rank_pass import RankPass
from bench.ranks.log import WrongResultError
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy, Wiring
from bench.training.data import open_data
from bench.training.models import TORCH_DTYPES, build_model

CUT_LAYERS = 2
CUT_VOCABULARY = 512


def cut_cell(cell: Cell, seq_len: int) -> Cell:
    """Return the cell with a two-layer model, a small vocabulary, a narrow MLP and random weights."""
    model = replace(
        cell.model,
        path=None,
        num_layers=CUT_LAYERS,
        vocab_size=min(cell.model.vocab_size, CUT_VOCABULARY),
        intermediate_size=min(cell.model.intermediate_size, cell.model.hidden_size),
    )
    data = DataConfig(name="synthetic", path=None, tokenizer=None, prompt_tokens=0, packing=cell.data.packing)
    return replace(cell, model=model, data=data, seq_len=seq_len, padding=0, checkpointing=False)


Ordered = TypeVar("Ordered", float, tuple[float, int])


class ProbePass(RankPass):
    found: ProbeSection | None = None

    def before_steps(self) -> None:
        trainer = self.measurement.subject.trainer
        if trainer is None or trainer.cell.experiment != EXPERIMENT:
            return
        with self.measurement.log.during("probe"), without_memory_limit():
            self.found = probe(trainer.strategy, trainer.wiring, self.measurement.subject.device)
            wrong = why_wrong(self.found)
            if wrong is not None:  # on every rank: they have added up their counts
                raise WrongResultError(wrong)

    def part(self) -> ProbeSection | None:
        return self.found


def probe(strategy: Strategy, wiring: Wiring, device: torch.device) -> ProbeSection:
    """What all ranks found together; every rank must call it."""
    tokens = parity_len(strategy)
    cell = cut_cell(strategy.cell, tokens)
    model = build_model(
        cell.model, attention_name=wiring.attention_name, max_positions=tokens, seed=cell.seed
    )
    model = model.to(device, TORCH_DTYPES["fp64" if cell.dtype == "fp64" else "fp32"]).train()
    whole = open_data(cell, device).micro_batch(0, 0, 0, tokens)
    places = places_of(whole)
    changes = changes_of(places)
    batch = strategy.shard(whole) if wiring.shards_batch else whole
    own = Places(*(_dealt(strategy, wiring, each) for each in (places.documents, places.positions)))
    named = {"position_ids": batch.position_ids}
    with strategy.step(batch), _autocast(cell, device):
        counts, noise = leaks(parts_of(model, batch.input_ids, named), own, changes)
        with torch.no_grad():
            losses_BS = position_losses(model, batch)
    exact_BT, plain_BT = reference_losses(model, whole, cell, device)
    missed_BS = losses_BS - _dealt(strategy, wiring, exact_BT)
    error, position = _largest(_worst(missed_BS, exact_BT, own.positions))
    plain, _ = _worst(plain_BT - exact_BT, exact_BT, places.positions)
    return ProbeSection(
        tokens=tokens,
        documents=int(places.documents.max()) + 1,
        changes=len(changes),
        moved=added_up(counts, dist.group.WORLD),
        noise=_largest(noise),
        loss_error=error,
        loss_position=position,
        loss_limit=limit_of("loss", cell.dtype, plain),
    )


def places_of(batch: Batch) -> Places:
    """Of whole sequences; without packing each is one document."""
    sequences, tokens = batch.input_ids.shape
    documents = batch.documents or Documents(((tokens,),) * sequences)
    lengths = [len(document) for row in range(sequences) for document in documents.of(row)]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    device = batch.input_ids.device
    return Places(
        numbers.view(sequences, tokens).to(device), torch.arange(tokens, device=device).expand(sequences, -1)
    )


def position_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Each token's loss, [B, S], in float64; 0 where its label does not count."""
    decoder = model.get_decoder()
    hidden = decoder(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).last_hidden_state
    logits_BSV = model.get_output_embeddings()(hidden).double()
    return cross_entropy(
        logits_BSV.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    ).view(batch.labels.shape)


def reference_losses(
    model: PreTrainedModel, whole: Batch, cell: Cell, device: torch.device
) -> tuple[Tensor, Tensor]:
    """One device's losses of whole sequences, [B, T]: in float64, and in the cell's dtype."""
    with plain_attention_installed() as attention, torch.no_grad():
        attention.documents = whole.documents
        reference = copy.deepcopy(model)
        reference.config._attn_implementation = PLAIN_NAME
        with _autocast(cell, device):
            plain = position_losses(reference, whole)
        return position_losses(reference.double(), whole), plain


def _dealt(strategy: Strategy, wiring: Wiring, whole_BT: Tensor) -> Tensor:
    """This rank's tokens, [B, S]."""
    if not wiring.shards_batch:
        return whole_BT
    return torch.cat([whole_BT[:, piece] for piece in strategy.slices(whole_BT.shape[1])], dim=1)


def _autocast(cell: Cell, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, TORCH_DTYPES[cell.dtype], enabled=cell.dtype in LOW_PRECISION)


def _worst(missed: Tensor, exact: Tensor, positions: Tensor) -> tuple[float, int]:
    """The largest error, relative to the mean loss, and its position."""
    missed = missed.abs().nan_to_num(nan=torch.inf)
    return float(missed.max() / exact.mean()), int(positions.flatten()[missed.argmax()])


def added_up(counts: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Moved]:
    """The counts of all ranks of a group, one rank's own without any; every rank must call it."""
    totals = {kind: row.clone() for kind, row in counts.items()}
    for total in totals.values() if group is not None else ():
        dist.all_reduce(total, group=group)
    names = Moved.__struct_fields__
    return {kind: Moved(**dict(zip(names, row.tolist(), strict=True))) for kind, row in totals.items()}


def _largest(own: Ordered) -> Ordered:
    """That of any rank; every rank must call it."""
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return max(everyone)


PASS = ProbePass
