"""verify says that right runs agree, and where each wrong one parts from the first."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands.verify.command import verify
from lockstep.commands.verify.compare import Row, compare, metrics
from lockstep.commands.verify.plan import PER_STEP, Plan, Variant
from lockstep.commands.verify.report import Report, print_report
from lockstep.commands.verify.trace import Job, Trace, fingerprint, listed_otherwise, read, trace_run
from lockstep.config import Config, Execution
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests import journals
from tests.commands.plans import HERE, plan_for
from tests.inprocess import said
from tests.pool import Pool
from tests.subprocesses import run_lockstep

FAULTS = "tests.commands.faults"


@pytest.fixture(scope="module", autouse=True)
def _pool() -> Iterator[None]:
    """One world for each number of processes, for all runs of this file."""
    global _start, _run
    with Pool() as pool:
        _run = pool.run

        def start(job: Job, _: Variant) -> None:
            pool.start(trace_run, job, execution=job.config.execution)

        _start = start
        yield


_start: Callable[[Job, Variant], None]
_run: Callable[..., list[Any]]


def _verify(plan: Plan) -> Report:
    return verify(plan, start=_start)


def _reasons(report: Report) -> list[str]:
    return [row.reason for row in report.differing()]


# Right runs


def test_a_right_exact_run_has_the_same_bits_whatever_is_varied() -> None:
    fields: dict[str, Any] = {"model": "dropping_net", "exact": 4, "flip": True, "ema": 0.9, "steps": 6}
    report = _verify(plan_for(1, 2, 3, vary=True, **fields))
    assert report.holds
    assert [row.verdict for each in report.rows for row in each.comparison.rows if row.verdict != "equal"] == []
    assert {each.comparison.other.weights_sha256 for each in report.rows} == {report.first.weights_sha256}
    assert report.varied() == "N = 1, 2, 3; threads 1, 2; workers 0, 1; hash seeds 0, 1, 2, 3; order of listed folders"
    assert [row.variant.nproc for row in report.rows] == [2, 3, 3]


def _train(world: World, config: Config, folder: str) -> None:
    from lockstep.training.loop import train

    train(config, world, folder)


def test_what_is_traced_is_what_train_does(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": "dropping_net", "exact": 4, "flip": True, "ema": 0.9, "clip_norm": 0.1}
    fields["warmup_epochs"] = 1
    report = _verify(plan_for(1, 2, steps=100, **fields))
    base = report.first
    assert report.holds
    assert len(base.loss) == 12  # three epochs are all there is
    config = plan_for(1, 2, **fields).config.with_execution(nproc=3)
    _run(_train, 3, config, str(tmp_path))
    end = journals.read(tmp_path / "journal.jsonl")[-1]
    assert (end["steps"], end["ledger_sha256"], end["weights_sha256"]) == (12, base.ledger[-1], base.weights_sha256)
    assert base.metrics is not None
    assert (end["top1"], end["loss"]) == (base.metrics["top1"], base.metrics["loss"])
    # the moving average is that of the weights, from the first step's on
    weight, average = (base.kept[f"samples/{name}"].numpy() for name in ("0.weight", "ema.0.weight"))
    expected = weight[0]
    for now, averaged in zip(weight, average, strict=True):
        expected = 0.9 * expected + 0.1 * now
        assert averaged == pytest.approx(expected, rel=1e-5)
    assert (average[-1] != weight[-1]).all()


def test_a_buffer_that_the_model_replaces_is_traced_too(tmp_path: Path) -> None:
    job = Job(str(tmp_path), plan_for(1, 2, model="centred_net").config, 3)
    trace_run(World.single(), job)
    trace = read(tmp_path)
    means = trace.kept["samples/0.mean"].flatten().tolist()
    assert len({0.0, *means}) == 4, "it moves in each step"
    assert trace.kept["final/0.mean"].item() == pytest.approx(means[-1])


RIGHT: dict[str, dict[str, Any]] = {
    "exact": {"exact": 4, "flip": True, "ema": 0.9, "clip_norm": 0.1, "warmup_epochs": 1},
    "exact, of uneven slices": {"exact": 5, "batch_size": 23},
    "exact, fp16": {"exact": 3, "precision": "fp16"},
    "exact, a buffer that is replaced": {"exact": 3, "model": "centred_net"},
    "plain, mixed": {"batch_size": 23, "mixup": 0.4, "cutmix": 1.0, "flip": True},
    "exact, balanced and repeated": {"exact": 5, "balance": "equal", "aug_repeats": 2, "loss": "focal", "mixup": 0.4},
    "plain, weighted": {"class_weights": "auto", "loss": "bce", "balance": "none", "batch_size": 23},
    "plain, dropout and batch norm": {"model": "dropping_net"},
    "plain, batch norm over groups": {"model": "normed_net", "batch_norm": "groups:5"},
    "plain": {"flip": True, "ema": 0.9, "clip_norm": 0.1},
    "plain, uneven micro-batches": {"accumulate": 3, "batch_size": 23},
}


QUICK = ("exact, a buffer that is replaced",)  # dropout and batch norm in the varied run above
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RIGHT]


@pytest.mark.parametrize("name", MARKED)
def test_a_right_run_holds(name: str) -> None:
    report = _verify(plan_for(1, 2, 3, **RIGHT[name]))
    assert report.holds, _reasons(report)
    assert not report.law
    if not RIGHT[name].get("exact"):
        shown = [row.wide is not None and row.wide.largest <= report.bound for row in report.rows]
        assert all(shown), "rounding is shown, not taken for granted"


@pytest.mark.parametrize("patch", ["", "no_update"])
def test_rounding_beyond_the_tolerance_is_told_from_a_fault_by_float64(patch: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(PER_STEP, "fp32", 1e-9)
    report = _verify(plan_for(1, 3, patch=patch))
    assert not report.rows[0].comparison.holds
    assert report.holds  # as plain mode claims no more


# Wrong ones: the run that they are planted into, and where that is said to part

PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "tiny_factor": ({}, "gradient"),
    "one_parameter_not_reduced": ({}, "replicas from step 1 (1.bias"),
    "nan_on_two": ({}, "step 3: gradient norm"),
    "overflow_on_two": ({"precision": "fp16"}, "skipped steps"),
    "outgrown_float32": ({}, "inf"),
    "remainder_dropped": ({"accumulate": 3}, "step 1: loss"),
    "momentum_drifts": ({}, "replicas from step 1 (momentum_buffer"),
    "momentum_lost": ({}, "step 2: optimizer (momentum_buffer"),
    "decay_by_size": ({}, "step 1: weights"),
    "average_of_one_rank": ({"ema": 0.9}, "replicas from step 1 (ema."),
    "mixed_within_the_share": ({"mixup": 0.4, "cutmix": 1.0, "batch_size": 26}, "images from step 1"),
    "buffers_of_one_rank": ({"model": "averaging_net"}, "0.mean of rank 1"),
    "kernel_by_size": ({"exact": 4}, "step 1: gradient norm"),
    f"{HERE}:nothing": ({"model": "normed_net", "batch_norm": "local"}, "buffers"),
    f"{HERE}:dropout_by_rank": ({"model": "dropping_net", "batch_norm": "global"}, "step 1: loss"),
    f"{HERE}:reshuffle_by_size": ({"steps": 6}, "ledger from step 5"),
    f"{HERE}:rank_seeded_augmentation": ({"flip": True}, "images from step 1"),
    f"{HERE}:rate_times_size": ({}, "learning rate"),
    f"{HERE}:evaluate_means": ({}, "evaluation"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    fields, said = PLANTED[name]
    report = _verify(plan_for(1, 2, patch=name if ":" in name else f"{FAULTS}:{name}", law="off", **fields))
    assert not report.holds
    assert said in _reasons(report)[0]


def test_a_mean_of_means_is_seen_where_shares_are_uneven_and_only_there() -> None:
    report = _verify(plan_for(1, 2, 5, patch="mean_of_means"))
    assert [row.variant.nproc for row in report.differing()] == [5]


def test_floats_added_by_ddp_are_not_exact() -> None:
    report = _verify(plan_for(1, 4, patch="float_all_reduce", exact=8, steps=8))
    assert not report.holds
    assert report.rows[0].comparison.row("weights").largest < 1e-5


@pytest.mark.parametrize("nproc", [(1, 2), pytest.param((1,), marks=pytest.mark.slow)])
def test_what_differs_in_the_varied_run_is_looked_for_one_by_one(nproc: tuple[int, ...]) -> None:
    report = _verify(plan_for(*nproc, vary=True, patch="images_by_threads", steps=2))
    last = report.rows[len(nproc) - 2].variant if len(nproc) > 1 else report.base
    found = {row.variant.beside(last): row.comparison.holds for row in report.rows[len(nproc) - 1 :]}
    assert [what for what, holds in found.items() if not holds] == [next(iter(found)), "2 thread(s)"]
    assert len(found) == 5
    causes = [report.cause(row) for row in report.differing()]
    assert [cause.partition(":")[0] for cause in causes] == ["", "by the number of CPU threads alone"]


def test_a_model_that_runs_in_float32_alone_is_judged_by_the_tolerance() -> None:
    report = _verify(plan_for(1, 2, model="narrow_net", batch_size=25))
    assert report.holds
    assert report.unseen == "float64 failed: TypeError: float32 alone"
    assert not _verify(plan_for(1, 2, patch="mean_of_means", model="narrow_net", batch_size=25)).holds


@pytest.mark.slow
def test_what_a_model_rounds_by_its_own_casts_is_rounding() -> None:
    report = _verify(plan_for(1, 2, model="casting_net", batch_size=25))
    assert report.holds
    assert [row.comparison.holds for row in report.rows] == [False]
    assert report.unseen == ""


def test_a_diverging_run_is_refused() -> None:
    with pytest.raises(UserError, match="non-finite at step"):
        _verify(plan_for(1, 2, lr=1e38, steps=6))


def test_a_patched_step_needs_its_optimizer() -> None:
    with pytest.raises(WorkerFailed, match=r"run\.step without optimizer and sync"):
        _verify(plan_for(1, 2, patch="step_without_optimizer"))


@pytest.mark.slow
def test_a_difference_that_float64_has_not_alone_is_no_rounding() -> None:
    report = _verify(plan_for(1, 2, model="turning_net", steps=6))
    assert report.differing()


def test_what_the_clock_makes_is_not_blamed_on_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    report = _verify(plan_for(1, 2, patch="by_the_clock"))
    assert report.itself == "images from step 1"
    assert report.law[0] == "weights will differ with every run: the clock"
    print_report(report)
    told = capsys.readouterr().out
    assert "the first run, taken again, is another one too: images from step 1" in told
    assert "inf" not in told
    assert _verify(plan_for(1, 2, patch="rate_times_size")).itself == ""


def test_float64_does_not_explain_what_earlier_runs_left_nor_what_the_self_check_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(1, 2, patch="reads_what_a_run_left", law="off")
    report = _verify(replace(plan, config=plan.config.with_execution(data_dir=str(tmp_path))))
    assert not report.holds
    assert "from step 1" in report.itself
    report = _verify(plan_for(1, 2, model="centring_net"))
    assert not report.holds
    assert not report.differing(), "float64 shows nothing"
    print_report(report)
    told = capsys.readouterr().out
    assert told.count("self-check: ") == told.count("the gradient of weight is ") == 1, "not of each run with its size"
    assert "the self-check found what float64 did not show" in told


def test_every_way_to_list_a_folder_gives_another_order(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    usual = (
        [each.name for each in tmp_path.iterdir()],
        [each.name for each in os.scandir(tmp_path)],
        next(os.walk(tmp_path))[1],
    )
    with listed_otherwise():
        entries = os.scandir(tmp_path)
        first = next(entries).name
        entries.close()
        with os.scandir(tmp_path) as again:
            other = (
                [each.name for each in tmp_path.iterdir()],
                [each.name for each in again],
                next(os.walk(tmp_path))[1],
            )
    assert first == usual[1][-1]
    assert other == tuple([names[2], names[0], names[1]] for names in usual)
    assert [each.name for each in tmp_path.iterdir()] == usual[0]


# The command


EXACT = ("verify", "digits", "--nproc", "1,2", "--exact", "4", "--steps", "3", "--model", "net:Counted")
NET = """
import itertools
import torch
class Counted(torch.nn.Linear):
    made = itertools.count()
    def __init__(self, in_channels, num_classes, image_size):
        torch.manual_seed(next(self.made))
        super().__init__(in_channels * image_size**2, num_classes)
    def forward(self, images):
        return super().forward(images.flatten(1))
"""


@pytest.mark.slow
def test_the_command_varies_what_only_another_interpreter_has(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    ended = run_lockstep(*EXACT, cwd=tmp_path, timeout=240)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    assert "holds: the same bits on N = 1, 2; threads" in ended.out
    assert "hash seeds 0, 1, 2; order of listed folders" in ended.out
    assert "hash seed 2, folders listed in another order: 3 steps" in ended.err


def _by_hash_seed(program: str) -> list[list[str]]:
    """Lines that a program prints under the hash seeds 0, 1 and 2."""
    environs = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in range(3)]
    return [subprocess.check_output([sys.executable, "-c", program], env=e, text=True).split() for e in environs]


@pytest.mark.slow
def test_a_set_that_two_hash_seeds_put_in_the_same_order_is_found_by_another_one(tmp_path: Path) -> None:
    sets = [f'{{"a{i}", "b{i}"}}' for i in range(64)]
    firsts = _by_hash_seed(f"for names in [{', '.join(sets)}]: print(next(iter(names)))")
    chosen = next(i for i, (zero, one, two) in enumerate(zip(*firsts, strict=True)) if zero == one != two)
    order = f"itertools.count(next(iter({sets[chosen]}))[0] == 'a')"
    (tmp_path / "net.py").write_text(NET.replace("itertools.count()", order))
    ended = run_lockstep(*EXACT, cwd=tmp_path, timeout=240)
    assert ended.code == 1, ended.text
    found = re.findall("^(.*) differs: ", ended.out, re.MULTILINE)
    assert [re.sub("[0-9]+ thread.s., ", "", run) for run in found[1:]] == ["N = 2, hash seed 2"], ended.out
    assert re.findall(r"\n  by how texts hash \(the order of a set\) alone: N = 2, .*hash seed 1 holds\n", ended.out)


@pytest.mark.slow
def test_a_failure_of_a_process_of_its_own_is_told_as_any_other(tmp_path: Path) -> None:
    fails = "assert not (torch.distributed.is_initialized() and torch.distributed.get_rank()), 'no luck'"
    (tmp_path / "net.py").write_text(NET.replace("torch.manual_seed(next(self.made))", fails))
    ended = run_lockstep(*EXACT, cwd=tmp_path, timeout=240)
    assert ended.code == 1, ended.text
    assert "lockstep: rank 1: AssertionError: no luck" in ended.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc", "1", "--no-vary"], "compares nothing"),
        (["--nproc", "2,2"], "compares nothing"),
        (["--nproc", "1,65"], "smaller than the 65 processes"),
        (["--steps", "0"], "--steps 0 is too small"),
        (["--strategy", "fsdp"], "--strategy fsdp"),
        (["--patch", "json:nowhere"], "nowhere"),
        (["--model", "digits_nett"], "digits_net"),
    ],
)
def test_bad_flags_end_with_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, "verify", *flags, code=2)[1]


def test_verify_takes_the_flags_of_train() -> None:
    from lockstep.commands.shared.arguments import parse
    from lockstep.config.recipes import recipe

    arguments = ["--nproc", "1,4", "--lr", "0.5", "--flip", "--exact", "8", "--threads", "2", "--data-dir", "d"]
    _, plan = parse(Plan(config=recipe("cifar10")), arguments)
    config = plan.config.with_execution(nproc=4)
    assert type(config) is Config
    assert type(config.execution) is Execution
    assert (plan.nproc, config.execution.nproc, config.execution.threads) == ((1, 4), 4, 2)
    assert (config.optim.lr, config.data.flip, config.exact, config.execution.data_dir) == (0.5, True, 8, "d")
    assert config.model == recipe("cifar10").model


# Its parts


def _trace(values: np.ndarray[Any, Any], n: int = 1, **fields: Any) -> Trace:
    """A trace of one parameter "w" and one buffer "b" with these values at each step: [steps, 2, entries]."""
    steps = len(values)
    trace = Trace(n, names=["w", "b"], kinds=["weights", "buffers"], skipped=[False] * steps)
    trace.ledger, trace.images = [str(i) for i in range(steps)], list(range(steps))
    trace.loss, trace.norm, trace.lr = [1.0] * steps, [1.0] * steps, [[0.1]] * steps
    trace.digests = [[hash(row.tobytes()) for row in step] for step in [*values, values[-1]]]
    trace.metrics = {"top1": 0.5, "top5": 1.0, "loss": 1.0, "count": 100}
    trace.kept = {"scales": torch.from_numpy(np.abs([*values, values[-1]]).max(-1))}
    for i, name in enumerate(trace.names):
        trace.kept[f"samples/{name}"] = torch.tensor(values[:, i])
        trace.kept[f"final/{name}"] = torch.tensor(values[-1, i])
    for name, value in fields.items():
        setattr(trace, name, value)
    return trace


def test_a_difference_is_placed_at_its_first_step_and_tensor() -> None:
    values = np.full((5, 2, 4), 2.0)
    other = values.copy()
    other[1:, 0, 2] += 1e-7  # rounding
    other[3:, 1, 1] += 0.5
    found = compare(_trace(values), _trace(other, 2), per_step=1e-6)
    assert found.row("weights") == Row("weights", "within tolerance", cast(float, pytest.approx(5e-8)), 2, "w")
    assert found.row("buffers") == Row("buffers", "different", 0.25, 4, "b")
    assert found.row("ledger").verdict == "equal"
    bits = compare(_trace(values), _trace(other, 2), per_step=0.0)
    assert (bits.row("weights").verdict, bits.row("weights").step) == ("different", 2)


def test_the_tolerance_grows_with_the_steps() -> None:
    values = np.ones((4, 2, 4))
    other = values + np.array([0.5e-6, 1.5e-6, 2.5e-6, 4.5e-6])[:, None, None]
    found = compare(_trace(values), _trace(other, 2), per_step=1e-6)
    assert (found.row("weights").verdict, found.row("weights").step) == ("different", 4)


def test_a_tensor_of_nothing_but_rounding_is_measured_against_the_others() -> None:
    trace, other = (_trace(np.ones((1, 2, 4)), n) for n in (1, 2))
    for each, noise in ((trace, 1e-9), (other, -1e-9)):
        each.names, each.kinds = ["w", "v", "b"], ["weights", "weights", "buffers"]
        each.digests = [[int(1e9 * noise)] * 3] * 2
        each.kept["final/v"] = torch.full((4,), noise)
        each.kept["samples/v"] = torch.full((1, 4), noise, dtype=torch.float64)
        each.kept["scales"] = torch.tensor([[1.0, 1e-9, 1.0]] * 2, dtype=torch.float64)
    assert compare(trace, other, 1e-5).row("weights").verdict == "within tolerance"


def test_nan_equals_nan_and_nothing_else() -> None:
    values = np.ones((2, 2, 4))
    base = _trace(values, loss=[1.0, math.nan])
    assert compare(base, _trace(values, 2, loss=[1.0, math.nan]), 1e-6).row("loss").verdict == "equal"
    row = compare(base, _trace(values, 2, loss=[1.0, 1.0]), 1e-6).row("loss")
    assert (row.verdict, row.largest, row.step) == ("different", math.inf, 2)


@pytest.mark.parametrize(
    ("changed", "tolerance", "verdict"),
    [
        ({}, 0.0, "equal"),
        ({"loss": 1.0 + 1e-9}, 0.0, "different"),
        ({"loss": 1.0 + 1e-9}, 1e-6, "within tolerance"),
        ({"top1": 0.51}, 1e-6, "within tolerance"),  # one image of a hundred
        ({"top1": 0.52}, 1e-6, "different"),
        ({"count": 99}, 1e-6, "different"),
    ],
)
def test_metrics_may_differ_by_an_image_in_plain_mode_alone(
    changed: dict[str, float], tolerance: float, verdict: str
) -> None:
    base = {"top1": 0.5, "top5": 1.0, "loss": 1.0, "count": 100}
    assert metrics(base, base | changed, tolerance).verdict == verdict


@settings(deadline=None)
@given(st.permutations(range(7)), st.integers(0, 7))
def test_a_fingerprint_is_the_sum_of_its_parts_in_any_order(order: list[int], cut: int) -> None:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(7, 3, 4, 4, generator=generator), torch.arange(7) % 3
    whole = fingerprint(images, labels)
    images, labels = images[order], labels[order]
    assert (fingerprint(images[:cut], labels[:cut]) + fingerprint(images[cut:], labels[cut:])) % 2**64 == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8])
def test_a_fingerprint_sees_one_pixel_one_label_and_an_exchange(dtype: torch.dtype) -> None:
    images, labels = (torch.arange(2 * 3 * 5 * 5) % 200).view(2, 3, 5, 5).to(dtype), torch.tensor([1, 2])
    whole = fingerprint(images, labels)
    changed = images.clone()
    changed[1, 2, 4, 4] += 1
    assert fingerprint(changed, labels) != whole
    assert fingerprint(images, torch.tensor([1, 3])) != whole
    assert fingerprint(images, labels.flip(0)) != whole
    assert fingerprint(images.flip(3), labels) != whole
    assert fingerprint(images.contiguous(memory_format=torch.channels_last), labels) == whole
