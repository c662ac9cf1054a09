"""Cells and first line of `experiment=published_memory` and `experiment=published_throughput`."""

from dataclasses import replace

import pytest

from bench.common.environment import installed_version
from bench.config import ConfigError
from bench.extras.predict.prediction import expected_by_cost_model
from bench.measure import planned_stages
from bench.plan.estimate import Estimate
from bench.plan.experiments.published import mode_line, published_cells
from bench.plan.planned import planned_cell
from bench.request.composition import compose_words
from tests.support.cells import FOUR_H100, TWO_CORES

ONE_H100 = replace(FOUR_H100, gpus=FOUR_H100.gpus[:1])


def cells_of(name, *words, machine=TWO_CORES):
    return published_cells([compose_words(f"experiment=published_{name}", *words)], machine)


@pytest.fixture(scope="module")
def predicted():
    return cells_of("memory", "trainer=native")


def test_published_cells_are_predicted_for_4_h100_without_gpus(predicted):
    named = {(cell.mode, cell.hardware, cell.model.name, cell.engine.name, cell.loss) for cell in predicted}
    assert named == {("predict", "h100_80gb", "qwen3_4b", "zero3", "untiled")}
    asked = [(c.seq_len // 1024, c.cluster.world_size, c.sp_degree) for c in predicted if c.offload.optimizer]
    assert asked == [(8, 1, 1), (8, 4, 4), (32, 4, 4), (64, 4, 4), (96, 4, 4), (128, 4, 4)]
    assert len(predicted) == 2 * len(asked)
    assert {(cell.grad_accum, cell.checkpointing) for cell in predicted} == {(8, True)}
    first = mode_line([compose_words("experiment=published_memory")], TWO_CORES)
    assert first.startswith("predicted for 4 x h100_80gb and not measured")


@pytest.mark.parametrize(
    ("words", "machine", "mode"),
    [
        ((), FOUR_H100, "measure"),
        (("mode=predict",), FOUR_H100, "predict"),
        (("trainer=native",), ONE_H100, "replay"),
        (("trainer=native", "hardware=h200_141gb"), ONE_H100, "predict"),
        (("model=qwen3_nano",), TWO_CORES, "measure"),
        (("model=qwen3_8b",), TWO_CORES, "predict"),
    ],
)
def test_published_mode_follows_from_the_machine_and_the_model(words, machine, mode):
    cells = cells_of("throughput", *words, machine=machine)
    assert {cell.mode for cell in cells} == {mode}
    assert {cell.offload.optimizer for cell in cells} == {False}


def test_unusable_gpus_are_refused_and_not_predicted():
    broken = replace(TWO_CORES, gpu_error="a GPU is here, but torch is built without CUDA; install a build")
    with pytest.raises(ConfigError, match="is built without CUDA; install a build, or take cluster=cpu"):
        cells_of("throughput", machine=broken)
    assert {cell.mode for cell in cells_of("throughput", "cluster=cpu", machine=broken)} == {"predict"}


def test_requested_values_replace_those_of_the_post():
    words = ("model=qwen3_nano", "seq_len=1k", "cluster.world_size=2", "strategy=ring", "loss=chunked")
    base, cell = cells_of("throughput", "trainer=native", *words)
    assert (cell.strategy, cell.cluster.world_size, cell.loss, cell.seq_len) == ("ring", 2, "chunked", 1024)
    assert (base.strategy, base.cluster.world_size, base.seq_len) == ("local", 1, 1024)


@pytest.fixture
def with_stack(tmp_path, monkeypatch):
    """Make the trainer and the kernel of the post appear installed."""
    for package, version in (("trl", "1.16"), ("flash_attn", "2.8")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        metadata = tmp_path / f"{package}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed_version.cache_clear()
    yield
    installed_version.cache_clear()


@pytest.mark.usefixtures("with_stack")
def test_installed_trainer_and_kernel_of_the_post_come_first():
    def stacks_of(*words):
        cells = cells_of("throughput", "seq_len=8k", *words, machine=FOUR_H100)
        return [(cell.trainer, cell.kernel) for cell in cells if cell.sp_degree == 4]

    assert stacks_of() == [("trl", "flash_attn_2"), ("native", "torch_flash")]
    assert stacks_of("kernel=torch_flash") == [("trl", "torch_flash"), ("native", "torch_flash")]
    assert stacks_of("trainer=trl") == [("trl", "flash_attn_2")]


def test_published_memory_runs_three_full_length_steps():
    on_gpus = cells_of("memory", "trainer=native", machine=FOUR_H100)
    on_cpu = cells_of("memory", "trainer=native", "model=qwen3_nano")
    for cell in (*on_gpus, *on_cpu):
        for step_s in (1.0, 200.0):
            assert sum(stage.steps for stage in planned_stages(cell.measure, step_s)) == 3
    assert len(on_gpus) == 12
    planned = [planned_cell(cell, FOUR_H100) for cell in on_gpus]
    assert Estimate(expected_by_cost_model).remaining_s(planned) <= 45 * 60
