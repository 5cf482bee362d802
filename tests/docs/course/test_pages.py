"""The course: what its pages show is what the programs are and print, in both languages, and what each step says of N.

The right way's result is one on 1, 2 and 4 processes, the wrong way's is not. Each program is run once for all of it.
"""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import consequences
from tests.docs.course.pages import DRAWN, changes, pages, rendered
from tests.docs.course.programs import PAGES, PROGRAMS, ROOT, outputs, run

_FIGURE = re.compile(r"\d+(?:\.\d+)?")
PROCESSES = consequences.PROCESSES
ROUNDED = {"08": 0.03, "14": 0.003}  # the steps that compute in float16 and float32; how far losses may be apart


def _ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_step_has_a_program_and_a_page_of_its_name() -> None:
    names = [path.stem for path in sorted(PROGRAMS.glob("[0-9]*.py"))]
    assert [name[:2] for name in names] == list(consequences.STEPS) == [f"{i + 1:02}" for i in range(len(names))]
    for folder in PAGES:
        assert [page.stem for page in sorted(folder.glob("[0-9]*.md"))] == names


@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_programs_and_diffs_are_those_of_the_files(page: Path) -> None:
    assert rendered(page, DRAWN) == page.read_text(encoding="utf-8"), (
        "run: PYTHONPATH=src:examples/course python -m tests.docs.course.pages"
    )
    if page.stem != "index":
        kinds = [words.split()[0] for words in re.findall(r"<!-- begin (.*) -->", page.read_text(encoding="utf-8"))]
        assert "program" in kinds or "diff" in kinds
        assert {"table", "run"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_figures_and_outputs_are_those_of_the_programs(page: Path) -> None:
    """All steps, wrong and right, on 1, 2 and 4 processes; each is run once for all pages."""
    shown, found = (text.splitlines() for text in (page.read_text(encoding="utf-8"), rendered(page)))
    assert len(shown) == len(found)
    for ours, theirs in zip(shown, found, strict=True):
        rounded = any(step in page.stem or f"({step}" in ours for step in ("08-amp", "14-the-same"))
        assert nearly(ours, theirs) if rounded else ours == theirs


def nearly(one: str, other: str) -> bool:
    """Equal but for the rounding of float16 and float32, which other kernels do otherwise."""
    texts, figures = zip(*((_FIGURE.sub("#", text), _FIGURE.findall(text)) for text in (one, other)), strict=True)
    return texts[0] == texts[1] and [float(value) for value in figures[0]] == pytest.approx(
        [float(value) for value in figures[1]], rel=0.03, abs=0.02
    )


def test_what_is_not_nearly_equal_would_be_seen() -> None:
    line = "| right | test loss | 0.13 | 0.14 |"
    assert nearly(line, line.replace("0.13", "0.14"))
    assert not nearly(line, line.replace("0.13", "0.23"))
    assert not nearly(line, line.replace("test", "training"))


def test_programs_stay_short() -> None:
    for path in PROGRAMS.glob("[0-9]*.py"):
        assert len(path.read_text().splitlines()) < 170, path.name


def test_a_diff_leads_from_one_program_to_the_next() -> None:
    """What has a minus stands in the old one alone, or more often; with plus and blank it is the new one's."""
    texts = [path.read_text().splitlines() for path in sorted(PROGRAMS.glob("[0-9]*.py"))]
    for old, new in pairwise(texts):
        lines = changes(old, new)
        gone = Counter(line[1:] for line in lines if line.startswith("-"))
        come = Counter(line[1:] for line in lines if line.startswith("+"))
        assert gone <= Counter(old)
        assert Counter(old) - gone + come == Counter(new)


def figure(one: consequences.Figure, step: str, *flags: str) -> list[str]:
    return [one.read(run(step, n, flags)) for n in PROCESSES]


def test_one_evaluation_on_one_and_two_processes() -> None:
    whole, half = run("07", 1), run("07", 2, ("--wrong",))
    assert run("07", 2) == whole
    assert consequences.WEIGHTS.read(half) == consequences.WEIGHTS.read(whole)
    assert consequences.LOSS.read(half) != consequences.LOSS.read(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step in consequences.STEPS if step not in ROUNDED])
def test_the_right_way_does_not_depend_on_the_number(step: str) -> None:
    for flags in consequences.STEPS[step].ways.values():
        if "--wrong" not in flags and "--by-rank" not in flags:
            outputs = {run(step, n, flags) for n in PROCESSES}
            assert len(outputs) == 1, outputs


@pytest.mark.slow
@pytest.mark.parametrize("step", ROUNDED)
def test_in_lower_precision_it_depends_by_rounding_alone(step: str) -> None:
    assert [float(value) for value in figure(consequences.LOSS, step)] == pytest.approx(
        [float(consequences.LOSS.read(run(step, 1)))] * 3, abs=ROUNDED[step]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "figures"),
    [
        ("02", (consequences.WEIGHTS, consequences.LOSS)),
        ("03", (consequences.WEIGHTS, consequences.LOSS, consequences.STEPS_AN_EPOCH)),
        ("05", (consequences.WEIGHTS, consequences.TRAINING)),
        ("07", (consequences.LOSS, consequences.EVALUATED)),
        ("10", (consequences.LOSS, consequences.WEIGHTS)),
        ("11", (consequences.MASKS, consequences.LOSS, consequences.WEIGHTS)),
        ("14", (consequences.LOSS, consequences.STEPS_AN_EPOCH)),
    ],
)
def test_the_wrong_way_depends_on_the_number(step: str, figures: tuple[consequences.Figure, ...]) -> None:
    for one in figures:
        values = figure(one, step, "--wrong")
        assert len(set(values)) == len(PROCESSES), (one.name, values)
        if step != "11":  # whose right way draws other masks
            assert values[0] == one.read(run(step, 1)), "on one process both ways are the same"


@pytest.mark.slow
def test_the_plain_loop_misreports_what_it_trained() -> None:
    wrong, right = run("01", 1, ("--wrong",)), run("01", 1)
    assert consequences.WEIGHTS.read(wrong) == consequences.WEIGHTS.read(right)
    assert consequences.LOSS.read(wrong) != consequences.LOSS.read(right)
    assert consequences.ACCURACY.read(wrong) != consequences.ACCURACY.read(right)


@pytest.mark.slow
def test_a_second_run_finds_the_port_taken() -> None:
    assert figure(consequences.SECOND_RUN, "04", "--wrong") == ["EADDRINUSE"] * 3
    assert run("04", 2) == run("03", 2), "how processes are started changes nothing else"


@pytest.mark.slow
def test_a_forgotten_set_epoch_repeats_the_first_order() -> None:
    for flags, orders in (("--wrong",), 1), ((), 3):
        epochs = [line for line in run("06", 2, flags).splitlines() if "first samples" in line]
        assert len({line.partition("[")[2].partition("]")[0] for line in epochs}) == orders
        assert len(epochs) == 3


@pytest.mark.slow
def test_clipping_scaled_gradients_stops_the_training() -> None:
    wrong, right = figure(consequences.LOSS, "08", "--wrong"), figure(consequences.LOSS, "08")
    assert all(float(loss) > 2.2 for loss in wrong)
    assert all(float(loss) < 0.3 for loss in right)


@pytest.mark.slow
def test_accumulation_is_the_same_step_with_as_many_all_reduces_as_steps() -> None:
    plain = {consequences.WEIGHTS.read(run("07", n)) for n in PROCESSES}
    assert plain == set(figure(consequences.WEIGHTS, "09"))
    assert not plain & set(figure(consequences.WEIGHTS, "09", "--wrong"))
    assert figure(consequences.REDUCTIONS, "09") == figure(consequences.STEPS_AN_EPOCH, "09") == ["23"] * 3
    assert figure(consequences.REDUCTIONS, "09", "--wrong") == ["90"] * 3, "no_sync around backward alone does nothing"


@pytest.mark.slow
def test_seeds_by_rank_make_other_masks_and_another_training() -> None:
    assert figure(consequences.MASKS, "11", "--by-rank") == ["64"] * 3
    assert len(set(figure(consequences.LOSS, "11", "--by-rank"))) == 3


@pytest.mark.slow
def test_who_resumes_with_weights_alone_is_elsewhere_at_the_end() -> None:
    for n in PROCESSES:
        whole, wrong, right = (
            consequences.WEIGHTS.read(run("12", n, flags)) for flags in consequences.RESUMED.values()
        )
        assert right == whole != wrong


@pytest.mark.slow
def test_four_stop_and_two_go_on(tmp_path: Path) -> None:
    outputs("12", 4, ("--file", "run.pt", "--stop", "2"), tmp_path)
    resumed = outputs("12", 2, ("--file", "run.pt"), tmp_path)
    assert run("12", 1).endswith(resumed)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.slow
def test_two_machines_that_deal_by_local_rank_see_half() -> None:
    assert figure(consequences.SEEN, "13", "--wrong") == ["1437", "719", "719"]
    assert figure(consequences.SEEN, "13") == ["1437"] * 3
    assert consequences.WEIGHTS.read(run("13", 4)) == consequences.WEIGHTS.read(run("12", 1))
