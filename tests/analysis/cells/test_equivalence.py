"""Trainings compared with data parallelism: the noise floor, who is within it, and the report."""

import re

import pytest

from analysis.answers.loss_agreement import FLOOR_READING, equivalence_line, is_as_expected, with_equivalence
from analysis.answers.verdict import verdict
from analysis.cells.equivalence import loss_comparisons
from analysis.read.archive import read_archive
from analysis.read.views import View
from analysis.report import write_report
from analysis.show.figures.loss_curves import figure_name
from analysis.show.section import Table
from analysis.show.sections.loss_equivalence import COLUMNS, PUBLISHED
from tests.support.records import make_failure, make_record, write_sweep
from tests.support.sections import rows_by_heading

FALLING = [5.0, 4.8, 4.5, 4.2]
NORMS = [1.0, 1.1, 1.2, 1.1]
SETTINGS = {"optimizer": "sgd", "data.rank_order": "in_order", "inject_fault": "none", "dtype": "fp32"}


def training(role, *, strategy="local", loss=0.0, norm=0.0, logged=None, **settings):
    """Return a record whose last step differs from the reference by `loss` and `norm`."""
    losses = {"loss": [*FALLING[:-1], FALLING[-1] + loss], "grad_norm": [*NORMS[:-1], NORMS[-1] + norm]}
    losses |= {} if logged is None else {"logged_loss": [loss + logged for loss in FALLING]}
    config = {**SETTINGS, "strategy": strategy, **settings}
    return make_record(role=role, experiment="loss_equivalence", losses=losses, config=config)


REFERENCE = training("reference")
CONTROLS = [
    training("control", loss=1e-4, norm=2e-4, **{"data.rank_order": "reversed"}),
    training("control", loss=-1e-4, kernel="math"),
    training("control", kernel="flash_blocks"),
]
SOUND = training("cell", strategy="ulysses", loss=3e-4, norm=1e-4)
MISTAKE = training("injected_fault", strategy="ulysses", loss=1e-1, inject_fault="mask_off_by_one")

WRONG = {"status": "wrong_result", "reason": "a gate found it"}


@pytest.fixture
def compared(tmp_path):
    """Function from records to their comparisons."""
    return lambda *records: loss_comparisons(read_archive([write_sweep(tmp_path, records)], {}))


def test_noise_floor_from_controls_and_rows_as_its_multiples(compared):
    (found,) = compared(REFERENCE, *CONTROLS, SOUND, MISTAKE)
    roles = ["cell", "control", "control", "control", "injected_fault"]
    assert [row.training.role for row in found.rows] == roles
    sound, first, *_ = found.rows
    assert sound.max_loss_difference == pytest.approx(3e-4)
    assert sound.mean_loss_difference == pytest.approx(3e-4 / 4)
    of_four = found.noise.deviation.loss  # the last step of the reference and its controls: 0, 1, -1, 0 e-4
    assert of_four / found.noise.floor(1, 1).loss < of_four / found.floor().loss * 2
    assert sound.distance.loss * found.floor().loss / of_four == pytest.approx(
        3 / (2 / 3 * 5 / 4) ** 0.5, rel=1e-3
    )
    assert 0 < first.distance.loss < sound.distance.loss < 1
    assert found.fall == pytest.approx(0.8)
    assert is_as_expected(found)


def test_trainings_of_different_work_are_not_compared(compared):
    records = [training("reference", dtype="bf16"), training("cell", strategy="ring", dtype="bf16")]
    found = compared(REFERENCE, SOUND, *records)
    assert [len(comparison.other_trainings) for comparison in found] == [1, 1]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((SOUND, MISTAKE), "ulysses contiguous matched data parallelism over 4 steps"),
        ((training("cell", strategy="ring", loss=1e-2),), "ring contiguous does not match data parallelism"),
        (
            (training("injected_fault", inject_fault="mask_off_by_one"),),
            "within the noise and would not be found here: mask_off_by_one",
        ),
        ((make_failure("crashed", "why", config={**SETTINGS, "strategy": "ring"})
          | {"experiment": "loss_equivalence"},), "no steps to compare: ring (crashed)"),
    ],
)  # fmt: skip
def test_answer_says_which_trainings_match(compared, cells_of, records, said):
    found = compared(REFERENCE, *CONTROLS, MISTAKE, *records)
    plain = verdict(cells_of([*records]))
    answered = with_equivalence(plain, found, alone=True)
    matches = "matched" in said
    assert said in equivalence_line(found[0])
    assert answered.answer.startswith("1 training in 1 comparison" if matches else found[0].name)
    assert (answered.certainty, answered.to_decide) == ("", None)
    assert is_as_expected(found[0]) == matches
    assert with_equivalence(plain, [], alone=True) is plain


def shifted(record, by):
    """Return the record with another seed and its losses shifted."""
    losses = {**record["losses"], "loss": [loss + by for loss in record["losses"]["loss"]]}
    config = {**record["config"], "seed": 7}
    return {**record, "cell_id": record["cell_id"][::-1], "losses": losses, "config": config}


def test_seeds_are_compared_separately_and_judged_together(compared):
    alone = [REFERENCE, *CONTROLS, SOUND, MISTAKE]
    (one,) = compared(*alone)
    (both,) = compared(*alone, *(shifted(each, 0.5) for each in alone))
    assert both.name == f"{one.name}, 2 seeds"
    assert [len(row.trainings) for row in both.rows] == [2] * len(one.rows)
    assert both.control_counts == [3, 3]
    assert both.rows[0].mean_loss_difference == pytest.approx(one.rows[0].mean_loss_difference)
    assert both.floor().loss < one.floor().loss  # as more is known of the noise
    assert both.rows[0].distance.loss > one.rows[0].distance.loss
    wrong = training("cell", strategy="ring", loss=1e-1)
    (found,) = compared(*alone, *(shifted(each, 0.5) for each in alone), shifted(wrong, 0.5))
    assert "ring contiguous does not match data parallelism: seed 7, step 3: the loss is" in equivalence_line(
        found
    )


def test_seed_without_a_sound_reference_or_control_is_skipped(compared):
    others = [shifted(each, 0.5) for each in (REFERENCE | WRONG, SOUND)]
    (found,) = compared(REFERENCE, *CONTROLS, SOUND, MISTAKE, *others)
    assert len(found.seeds) == 1


def test_logged_losses_are_compared_with_data_parallelism(compared):
    stack = {"trainer": "transformers"}
    base, own = (
        training("cell", logged=0.5, **stack),
        training("cell", strategy="ulysses", logged=0.6, **stack),
    )
    (found,) = compared(REFERENCE, *CONTROLS, base, own)
    logged = {row.training.label: row.logged for row in found.rows}
    assert logged["ulysses contiguous under transformers"] == pytest.approx((0.1, 0.1))
    assert logged["local contiguous under transformers"] is None
    rows = rows_by_heading(Table.from_items(COLUMNS, found.rows), View.SUMMARY)
    (row,) = (row for row in rows if row["training"].startswith("ulysses"))
    assert row["logged loss distance: mean / largest (nats)"] == "1.0e-01 / 1.0e-01"


def test_report_has_loss_tables_figures_and_published_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("analysis.show.figures.figures.figures_for", lambda _: [])  # only those of trainings
    records = [REFERENCE, *CONTROLS, SOUND, MISTAKE]
    assert write_report(write_sweep(tmp_path, records))
    page, markdown = ((tmp_path / name).read_text() for name in ("report.html", "summary.md"))
    for text in (page, markdown):
        for shown in ("mistake: mask_off_by_one", "found", "1.0e-01", *(mean for _, mean, _ in PUBLISHED)):
            assert shown in text
    assert "matched data parallelism" in capsys.readouterr().out.replace("\n", " ")
    assert "zigzag" not in markdown
    svg = (tmp_path / "figures" / "loss_equivalence_8k_qwen3_nano_fp32_zero3_sgd.svg").read_text()
    for label in ("data parallelism", "ulysses contiguous", "controls", "mistake: mask_off_by_one"):
        assert svg.count(f">{label}</text>") == 1  # every training once, controls together
    assert FLOOR_READING in page
    assert page.count("<figure") == 1
    in_page = re.search(r"<svg role.*?</svg>", page, re.DOTALL)[0]
    turned = r'<(?:text|g) [^>]*transform="((?!rotate\(-0 )[^"]*)"'
    assert in_page.count("</text>") == svg.count("</text>")
    assert re.findall(turned, in_page) == re.findall(turned, svg)
    assert (tmp_path / "summary.csv").read_text().count("\n") == 1 + len(records)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((*CONTROLS, SOUND | WRONG, MISTAKE), "ended as wrong_result and does not count: a gate found it."),
        ((*CONTROLS[:2], CONTROLS[2] | WRONG, SOUND, MISTAKE), "Only 2 controls succeeded"),
        ((*CONTROLS, MISTAKE), "Nothing was compared"),
        ((*CONTROLS, SOUND), "No known mistake was injected"),
        ((*CONTROLS, SOUND, MISTAKE), "The loss fell by only 0.30 nats; a fall of less than 0.5"),
    ],
)
def test_comparison_that_proves_little_says_why(compared, records, said):
    losses = {"loss": [5.0, 4.9, 4.8, 4.7], "grad_norm": NORMS} if "fell" in said else REFERENCE["losses"]
    (found,) = compared(REFERENCE | {"losses": losses}, *records)
    assert said in equivalence_line(found)
    assert not is_as_expected(found)


def test_sound_control_replaces_a_failed_reference(compared):
    (found,) = compared(REFERENCE | WRONG, *CONTROLS, SOUND, MISTAKE)
    assert found.reference.role == "control"
    wide = training("control", loss=1.0, **{"cluster.world_size": 2})  # which would widen the floor
    (sound, with_wide) = (compared(REFERENCE, *CONTROLS, *more, SOUND)[0] for more in ((), (wide | WRONG,)))
    assert with_wide.floor() == sound.floor()
    assert not is_as_expected(found)


def test_comparisons_are_named_by_differing_settings(compared):
    rates = [{"optimizer.learning_rate": rate, "data.path": "/my/texts"} for rate in (0.1, 0.2)]
    found = compared(*(training("reference", **each) for each in rates))
    names = [each.name for each in found]
    assert [name.rpartition(", ")[2] for name in names] == [
        "optimizer.learning_rate=0.1", "optimizer.learning_rate=0.2",
    ]  # fmt: skip
    assert len({figure_name(each) for each in found}) == 2
    assert not any(set(figure_name(each)) & {"/", " "} for each in found)
