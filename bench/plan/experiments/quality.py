"""Cells of experiment=quality, which scores answers to questions about long texts under each strategy.

With `model=checkpoint` every cell scores that model. Otherwise each strategy first trains a small model on
generated questions, in two stages. Its later cells score the model that it trained; those of all strategies
also score the model that the first strategy trained, so that scores of equal weights can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common.environment import Machine
from bench.common.labels import length_label, value_label
from bench.config import AUTO, NOT_USED, Cell, ConfigError
from bench.measure.quality.section import TRAINING_DATA
from bench.measure.weights.section import FOLDER_NAME
from bench.plan.experiments.max_length import CellChooser
from bench.plan.stored import CELLS
from bench.record.record import Record, Role, Status
from bench.request import values
from bench.request.choices import Raw, read_option
from bench.request.legality import WHOLE_WEIGHTS_ENGINE, refusal
from bench.request.model_numbers import ROPE_KEYS
from bench.request.placement import MULTI_NODE_CLUSTERS, place
from bench.request.resolve import resolve
from bench.training.questions import Encoder, read_questions
from bench.training.tasks import questions_of
from bench.training.trainer_facts import NATIVE

LARGEST_BYTE_VOCABULARY = 512
"""Largest vocabulary of a model that is taken to read bytes: 256 of them, and tokens of its own."""
SCORING_KEYS = ("strategy", "layout", "seq_len", "quality")
"""Keys that do not matter to the training of a model."""
CHECKPOINT = "checkpoint"
"""Value of `model` for weights from a folder."""
STRATEGIES_COMPARED = ("local", "ulysses", "ring")
"""Strategies that are compared if the request names none."""
TRAINED_SCALINGS = (NOT_USED, "yarn")
"""RoPE scalings of the model that is trained here, if the request names none."""


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """Cell of a training: the length and number of its sequences, its steps and its learning rate."""

    seq_len: int
    batch: int
    steps: int
    learning_rate: float


STAGES = (TrainingStage(64, 64, 500, 5e-3), TrainingStage(1024, 8, 150, 2.5e-3))
"""Stages of a training, each of which continues the one before."""


def first_cells(requests: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return the cells that are known before any has run: the first stages, or all that score checkpoints.

    Raises ConfigError for an invalid value.
    """
    return _cell_chooser(requests, machine)([])


def make_cell_chooser(requests: Sequence[Raw], machine: Machine) -> CellChooser | None:
    """Return the `CellChooser` of requests that train a model; None if all of them name a checkpoint."""
    return None if all(map(_is_given, requests)) else _cell_chooser(requests, machine)


def _cell_chooser(requests: Sequence[Raw], machine: Machine) -> CellChooser:
    """Return the function that chooses training cells first, then the cells that score models."""
    for request in requests:
        _refuse_settings(request)
    with_dtype = [_with_dtype(request, machine) for request in requests]
    by_strategy = [complete for request in with_dtype for complete in _with_strategies(request, machine)]

    def choose_cells(records: Sequence[Record]) -> list[Cell]:
        statuses = {record.cell_id: record.status for record in records}
        trained = [_train(request, machine, statuses) for request in by_strategy if not _is_given(request)]
        cells = [cell for training in trained for cell in training.cells]
        if all(training.has_ended for training in trained):
            for request in by_strategy:
                cells += _scoring_cells(request, trained, machine)
        return [*{cell.cell_id: cell for cell in cells}.values()]

    return choose_cells


def roles_of(cells: Sequence[Cell]) -> Mapping[str, Role]:
    """Return roles by cell id: TRAINING for cells that write the model of later ones."""
    return {cell.cell_id: Role.TRAINING for cell in cells if cell.data.name == TRAINING_DATA}


def opening_text(requests: Sequence[Raw], _: Machine) -> str:
    """Return the line that says which cells follow from the records of others."""
    if all(map(_is_given, requests)):
        return "experiment=quality: scores the checkpoint under each strategy"
    lengths = " and ".join(length_label(stage.seq_len) for stage in STAGES)
    return (
        f"experiment=quality: each strategy first trains a model on generated questions of up to {lengths}"
        " tokens; the cells that score the models follow, in all some 12 minutes on two CPU cores."
        " model=checkpoint model.path=FOLDER scores yours"
    )


@dataclass(frozen=True, slots=True)
class ModelTraining:
    """Cells of a training so far, one for each stage that has a model to start from."""

    request: Raw
    cells: Sequence[Cell]
    has_ended: bool
    """True if the last stage has a record, or an earlier one failed."""
    folder: Path | None
    """Checkpoint of the last stage; None if there is none."""


def _train(request: Raw, machine: Machine, statuses: Mapping[str, str]) -> ModelTraining:
    """Return the training of a request's strategy."""
    cells, folder = list[Cell](), None
    for stage in STAGES:
        cell = _training_cell(request, stage, folder, machine)
        cells.append(cell)
        status = statuses.get(cell.cell_id)
        if status != Status.OK:
            return ModelTraining(request, cells, has_ended=status is not None, folder=None)
        name = FOLDER_NAME.format(strategy=cell.strategy)
        folder = Path(request["sweep_dir"]) / CELLS / f"{cell.cell_id}-0" / name
    return ModelTraining(request, cells, has_ended=True, folder=folder)


def _training_cell(request: Raw, stage: TrainingStage, start: Path | None, machine: Machine) -> Cell:
    """Return the cell of a stage, which starts from the checkpoint `start` or from random weights."""
    model = request["model"] if start is None else {**read_option("model", CHECKPOINT), "path": str(start)}
    steps = {"steps": stage.steps, "min_timed_steps": stage.steps, "warmup_steps": 0, "budget_s": 1e5}
    return resolve(
        {
            **request,
            "seq_len": stage.seq_len,
            "batch": stage.batch,
            "model": {**model, "rope_scaling": NOT_USED},
            "data": read_option("data", TRAINING_DATA),
            "engine": {**request["engine"], "name": WHOLE_WEIGHTS_ENGINE},
            "optimizer": {
                **request["optimizer"],
                "learning_rate": stage.learning_rate,
                "schedule": "cosine",
                "warmup_steps": stage.steps // 20,
                "schedule_steps": stage.steps,
            },
            "measure": {**request["measure"], **steps, "weights": True, "trace": False, "repeats": 1},
        },
        machine,
    )


def _scoring_cells(request: Raw, trained: Sequence[ModelTraining], machine: Machine) -> Iterator[Cell]:
    """Yield the cells that score the checkpoint of a request, or the models of its trainings."""
    for model in [request["model"]] if _is_given(request) else _trained_models(request, trained):
        for length in _as_list(request["seq_len"]):
            cell = resolve({**request, "seq_len": length, "model": model}, machine)
            _refuse_unfit_questions(cell)
            yield cell


def _trained_models(request: Raw, trained: Sequence[ModelTraining]) -> Iterator[Raw]:
    """Yield the section `model` for each checkpoint and RoPE scaling that a request scores.

    Every strategy scores the first model of equal settings, also with the RoPE scalings that the request
    leaves open, and then the model that it trained itself.
    """
    checkpoint, scaling = read_option("model", CHECKPOINT), request["model"].get("rope_scaling", AUTO)
    scalings = TRAINED_SCALINGS if scaling == AUTO else (scaling,)
    settings = _training_settings(request)
    models = {
        training.folder: training.request["strategy"]
        for training in trained
        if training.folder is not None and _training_settings(training.request) == settings
    }
    for number, (folder, strategy) in enumerate(models.items()):
        if number == 0 or strategy == request["strategy"]:
            for choice in scalings if number == 0 else scalings[:1]:
                yield {**checkpoint, "path": str(folder), "rope_scaling": choice}


def _training_settings(request: Raw) -> dict[str, Any]:
    """Return the settings that the trainings of all strategies have in common."""
    model = {key: value for key, value in request["model"].items() if key not in ROPE_KEYS}
    return {key: value for key, value in request.items() if key not in SCORING_KEYS} | {"model": model}


def _refuse_settings(request: Raw) -> None:
    """Raise ConfigError for a setting that this experiment cannot have."""
    rules = {
        "trainer": (request["trainer"]["name"], NATIVE, "scores answers in the native loop"),
        "data": (request["data"]["name"], "text", f"trains on data={TRAINING_DATA} by itself"),
        "measure.weights": (request["measure"]["weights"], False, "writes the weights that it needs"),
        "measure.repeats": (request["measure"]["repeats"], 1, "runs every cell once"),
    }
    for key, (value, only, reason) in rules.items():
        if value != only:
            raise ConfigError(f"{key}={value_label(value)}: experiment=quality {reason}; leave {key} out")
    if _is_given(request):
        if request["data"]["path"] is not None:  # before it is read as text to train on
            count = values.whole_number("quality.questions", request["quality"]["questions"])
            read_questions(values.path("data.path", request["data"]["path"]), count)
        return
    if request["data"]["tokenizer"] is not None or request["data"]["path"] is not None:
        raise ConfigError(
            "data: questions of a file or a tokenizer need a model that reads them; name one with"
            " model=checkpoint model.path=FOLDER"
        )
    if request["cluster"]["name"] in MULTI_NODE_CLUSTERS:
        raise ConfigError(
            f"cluster={request['cluster']['name']}: a model is trained on one node only; name one with"
            " model=checkpoint model.path=FOLDER, a folder that every node has"
        )


def _refuse_unfit_questions(cell: Cell) -> None:
    """Raise ConfigError if the questions of a cell cannot be read, or do not fit into its sequences."""
    if cell.data.tokenizer is None and cell.model.vocab_size > LARGEST_BYTE_VOCABULARY:
        raise ConfigError(
            "data.tokenizer=null: questions would be bytes, and the model has"
            f" {cell.model.vocab_size} tokens; write data.tokenizer=FOLDER with the model's own tokenizer"
        )
    if cell.data.path is None:  # one generated question of each task shows whether they fit
        cell = replace(cell, quality=replace(cell.quality, questions=1))
    encoder = Encoder(cell.data.tokenizer, cell.model.vocab_size)
    for question in questions_of(cell, encoder):  # a context is cut to fit, and takes long to encode
        encoder.encode(replace(question, context=""), cell.seq_len + 1)


def _with_dtype(request: Raw, machine: Machine) -> Raw:
    """Return the request with its dtype, by default fp32 on a CPU and bf16 on GPUs."""
    default = "fp32" if place(request["cluster"], machine).device == "cpu" else "bf16"
    return {**request, "dtype": default} if request["dtype"] is None else request


def _with_strategies(request: Raw, machine: Machine) -> Iterator[Raw]:
    """Yield the request if it names a strategy, and otherwise a request for each default strategy."""
    if "strategy" in request:
        yield request
        return
    shortest = min(_as_list(request["seq_len"]), key=lambda length: values.tokens("seq_len", length))
    for name in STRATEGIES_COMPARED:
        complete = {**request, "strategy": read_option("strategy", name)}
        if refusal(resolve({**complete, "seq_len": shortest}, machine)) is None:
            yield complete


def _is_given(request: Raw) -> bool:
    """Return whether the request names a checkpoint, so that no model is trained."""
    return bool(request["model"]["name"] == CHECKPOINT)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
