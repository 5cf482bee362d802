"""verify says that right runs agree, and names what makes each wrong variant differ."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.commands.verify import agreement, rows
from lockstep.commands.verify.agreement import Comparison
from lockstep.commands.verify.diagnose import _from_traces
from lockstep.commands.verify.plan import Plan
from lockstep.commands.verify.probes import fingerprint
from lockstep.commands.verify.record import trace_all
from lockstep.commands.verify.report import Report
from lockstep.commands.verify.rows import Row
from lockstep.commands.verify.run import verify
from lockstep.commands.verify.switches import ExpectedDraws, even_batch
from lockstep.commands.verify.switching import candidates
from lockstep.commands.verify.trace import Job, Trace, read, write
from lockstep.config import Config, Execution
from lockstep.draws.intercept import _replace_methods
from lockstep.errors import UserError
from lockstep.processes.failures import WorkerFailed
from lockstep.processes.world import World
from tests import journals
from tests.commands.plans import HERE, plan_for
from tests.pool import Pool
from tests.ranks import run_ranks
from tests.subprocesses import run_lockstep

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _pool() -> Iterator[None]:
    """One world for each number of processes, for all runs of this file."""
    global _start
    with Pool() as pool:
        _start = pool.start
        yield


_start: Callable[..., list[Any]]


def _verify(plan: Plan) -> Report:
    return verify(plan, start=_start)


def _names(report: Report) -> dict[int, list[str]]:
    return {n: [cause.name for cause in causes] for n, causes in report.causes.items()}


# Right runs


def test_a_right_exact_run_has_the_same_bits_on_every_number_of_processes(tmp_path: Path) -> None:
    plan = plan_for(1, 2, 3, model="dropping_net", exact=4, flip=True, ema=0.9, steps=6, out=str(tmp_path / "kept"))
    report = _verify(replace(plan, json=str(tmp_path / "found.json")))
    assert report.holds
    assert not report.causes
    assert [row.verdict for c in report.comparisons for row in c.rows if row.verdict != "equal"] == []
    assert {c.other.weights_sha256 for c in report.comparisons} == {report.base.weights_sha256}
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["holds"] is True
    assert [c["processes"] for c in found["compared"]] == [2, 3]
    assert read(tmp_path / "kept" / "2-run").ledger == report.base.ledger
    with pytest.raises(UserError, match="not empty"):
        _verify(plan)


def _train(world: World, config: Config, folder: str) -> None:
    from lockstep.training.loop import train

    if world.rank == 0:
        Path(folder, "weights").mkdir()
    world.barrier()
    train(config, world, Path(folder))


def test_what_is_traced_is_what_train_does(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model": "dropping_net",
        "exact": 4,
        "flip": True,
        "ema": 0.9,
        "clip_norm": 0.1,
        "warmup_epochs": 1,
    }
    report = _verify(plan_for(1, 2, steps=100, **fields))
    base = report.base
    assert report.holds
    assert (len(base.loss), base.steps_per_epoch) == (12, 4)  # three epochs are all there is
    config = plan_for(1, 2, **fields).config_for(3)
    run_ranks(_train, 3, config, str(tmp_path), timeout=120)
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
    job = Job(str(tmp_path), plan_for(1, 2, model="centred_net").config_for(1), 3, "a run")
    trace_all(World.single(), [job])
    trace = read(tmp_path)
    means = trace.kept["samples/0.mean"].flatten().tolist()
    assert len({0.0, *means}) == 4, "it moves in each step"
    assert trace.kept["final/0.mean"].item() == pytest.approx(means[-1])


def test_a_right_plain_run_is_the_same_but_for_rounding() -> None:
    report = _verify(plan_for(1, 2, 5, model="normed_net", flip=True, accumulate=2))
    assert report.holds
    assert not report.causes
    verdicts = {row.quantity: row.verdict for row in report.comparisons[1].rows}
    assert verdicts["ledger"] == verdicts["images"] == verdicts["learning rate"] == verdicts["replicas"] == "equal"
    assert verdicts["weights"] == "within tolerance"  # no difference at all: were they shared?


def test_rounding_beyond_the_tolerance_is_told_from_a_fault_by_float64() -> None:
    report = _verify(replace(plan_for(1, 3), tolerance=1e-9))
    assert _names(report) == {3: ["rounding"]}
    assert report.holds  # as plain mode claims no more


# Wrong variants, each named, and nothing else with it

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "local batch norm": (
        {"patch": "local_batch_norm", "model": "normed_net", "batch_norm": "global"},
        "batch statistics",
    ),
    "plain mode's batch norm": ({"model": "normed_net", "batch_norm": "local"}, "batch statistics"),
    "dropout by rank": ({"patch": "dropout_by_rank", "model": "dropping_net", "batch_norm": "global"}, "dropout"),
    "both": (
        {"patch": "dropout_by_rank", "model": "dropping_net", "batch_norm": "local"},
        "batch statistics and dropout",
    ),
    "rounded on the way": ({"compress": "bf16"}, "compression"),
    "no reshuffle by N": ({"patch": "reshuffle_by_size", "steps": 6}, "order"),
    "order by rank": ({"patch": "order_by_rank"}, "order"),
    "rank-seeded augmentation": ({"patch": "rank_seeded_augmentation", "flip": True}, "augmentation"),
    "a random data set": ({"dataset": "noisy"}, "data set"),
    "rate times N": ({"patch": "rate_times_size"}, "learning rate"),
    "rate and augmentation": ({"patch": "two_bugs"}, "augmentation and learning rate"),
    "evaluation of one part": ({"patch": "evaluate_one_part"}, "evaluation"),
    "evaluation of one part, exact": ({"patch": "evaluate_one_part", "exact": 4}, "evaluation"),
    "evaluation that averages averages": ({"patch": "evaluate_means"}, "evaluation"),
    "dropout by rank, exact": ({"patch": "dropout_by_rank", "model": "dropping_net", "exact": 4}, "dropout"),
    "a sum for an average": ({"patch": "sum_for_average"}, "gradient scale"),
    "drifting replicas": ({"patch": "drifting_replicas"}, "replicas"),
}


SLOW = {"a random data set": pytest.mark.slow}  # it comes through loader workers


@pytest.mark.parametrize("case", [pytest.param(name, marks=SLOW.get(name, ())) for name in WRONG])
def test_a_wrong_variant_is_named(case: str) -> None:
    given, cause = WRONG[case]
    report = _verify(plan_for(1, 2, **given))
    assert _names(report) == {2: [cause]}
    assert not report.holds
    assert report.causes[2][0].finding
    assert report.causes[2][0].remedy(report.plan.config)


def test_a_missing_reshuffle_is_named_though_all_numbers_of_processes_agree() -> None:
    report = _verify(plan_for(1, 2, patch="no_reshuffle"))
    assert _names(report) == {1: ["order"]}
    assert not report.holds
    assert "epoch 2 repeats epoch 1" in report.comparisons[0].row("ledger").detail


def test_a_mean_of_means_is_named_where_shares_are_uneven_and_only_there() -> None:
    report = _verify(plan_for(1, 2, 5, patch="mean_of_means"))
    assert _names(report) == {5: ["uneven shares"]}
    assert not report.holds


def test_floats_added_by_ddp_are_not_exact_and_named() -> None:
    report = _verify(plan_for(1, 4, patch="float_all_reduce", exact=8, steps=8))
    assert _names(report) == {4: ["rounding"]}
    assert not report.holds
    assert report.comparisons[0].row("weights").largest < 1e-5


def test_a_model_that_runs_in_float32_alone_is_diagnosed_there() -> None:
    report = _verify(plan_for(1, 2, patch="mean_of_means", model="narrow_net", batch_size=25))
    assert _names(report) == {2: ["uneven shares"]}
    assert "float64 failed" in report.causes[2][0].finding


def test_a_diverging_run_is_refused() -> None:
    with pytest.raises(UserError, match="non-finite at step"):
        _verify(plan_for(1, 2, lr=1e38, steps=6))


def test_a_patched_step_needs_its_optimizer() -> None:
    with pytest.raises(WorkerFailed, match="an attribute `optimizer`"):
        _verify(plan_for(1, 2, patch="step_without_optimizer"))


# The command


def test_the_command_shows_a_table_and_ends_with_0(tmp_path: Path) -> None:
    flags = ["--nproc", "1,2", "--exact", "4", "--steps", "3"]
    ended = run_lockstep("verify", "digits", *flags, cwd=tmp_path, timeout=120)
    assert ended.code == 0, ended.text
    assert "N = 2 against 1" in ended.out
    assert "holds: the same bits on N = 1, 2" in ended.out
    assert "N = 2: 3 steps" in ended.err
    assert not ended.orphans


@pytest.mark.slow
def test_the_command_ends_with_1_and_the_reason(tmp_path: Path) -> None:
    flags = ["--nproc", "1,2", "--steps", "3", "--patch", f"{HERE}:rate_times_size"]
    ended = run_lockstep("verify", *flags, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=240, fresh=True)
    assert ended.code == 1, ended.text
    assert "N = 2 differs: learning rate" in ended.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc", "1"], "compares nothing"),
        (["--nproc", "2,2"], "compares nothing"),
        (["--nproc", "1,65"], "smaller than the 65 processes"),
        (["--steps", "0"], "takes no step"),
        (["--strategy", "single"], "--strategy single"),
        (["--sync-every", "4"], "verify with --sync-every 4"),
        (["--patch", "json:nowhere"], "nowhere"),
        (["--json", "no/where.json"], "its folder does not exist"),
        (["--model", "digits_nett"], "digits_net"),
    ],
)
def test_bad_flags_end_with_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_verify_takes_the_flags_of_train() -> None:
    from lockstep.commands.shared.arguments import parse
    from lockstep.config.recipes import recipe

    arguments = ["--nproc", "1,4", "--lr", "0.5", "--flip", "--exact", "8", "--threads", "2", "--data-dir", "d"]
    plan = parse(Plan, Plan(config=recipe("cifar10")), arguments, "verify", "")
    config = plan.config_for(4)
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
    trace.shares = [[[4]] for _ in range(steps)]
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
    found = agreement.compare(_trace(values), _trace(other, 2), per_step=1e-6)
    assert found.row("weights") == rows.Row("weights", "within tolerance", cast(float, pytest.approx(5e-8)), 2, "w")
    assert found.row("buffers") == rows.Row("buffers", "different", 0.25, 4, "b")
    assert found.row("ledger").verdict == "equal"
    bits = agreement.compare(_trace(values), _trace(other, 2), per_step=0.0)
    assert (bits.row("weights").verdict, bits.row("weights").step) == ("different", 2)


def test_the_tolerance_grows_with_the_steps() -> None:
    values = np.ones((4, 2, 4))
    other = values + np.array([0.5e-6, 1.5e-6, 2.5e-6, 4.5e-6])[:, None, None]
    found = agreement.compare(_trace(values), _trace(other, 2), per_step=1e-6)
    assert (found.row("weights").verdict, found.row("weights").step) == ("different", 4)


def test_a_tensor_of_nothing_but_rounding_is_measured_against_the_others() -> None:
    trace, other = (_trace(np.ones((1, 2, 4)), n) for n in (1, 2))
    for each, noise in ((trace, 1e-9), (other, -1e-9)):
        each.names, each.kinds = ["w", "v", "b"], ["weights", "weights", "buffers"]
        each.digests = [[int(1e9 * noise)] * 3] * 2
        each.kept["final/v"] = torch.full((4,), noise)
        each.kept["samples/v"] = torch.full((1, 4), noise, dtype=torch.float64)
        each.kept["scales"] = torch.tensor([[1.0, 1e-9, 1.0]] * 2, dtype=torch.float64)
    assert agreement.compare(trace, other, 1e-5).row("weights").verdict == "within tolerance"


def test_nan_equals_nan_and_nothing_else() -> None:
    values = np.ones((2, 2, 4))
    base = _trace(values, loss=[1.0, math.nan])
    assert agreement.compare(base, _trace(values, 2, loss=[1.0, math.nan]), 1e-6).row("loss").verdict == "equal"
    row = agreement.compare(base, _trace(values, 2, loss=[1.0, 1.0]), 1e-6).row("loss")
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
    assert rows.metrics(base, base | changed, tolerance).verdict == verdict


def test_replicas_that_differ_are_seen() -> None:
    values = np.ones((3, 2, 4))
    other = _trace(values, 2, diverged=[(2, 1, "weights"), (1, 1, "weights")])
    row = agreement.compare(_trace(values), other, 1e-6).row("replicas")
    assert (row.verdict, row.step) == ("different", 2)


def test_a_trace_survives_the_disk(tmp_path: Path) -> None:
    trace = _trace(np.ones((2, 2, 4)), norm=[1.0, math.nan], shares=[[[3, 2], [3]], [[2], []]])
    write(trace, tmp_path / "a")
    again = read(tmp_path / "a")
    assert again.shares == trace.shares
    assert again.diverged == trace.diverged
    assert all(torch.equal(again.kept[name], tensor) for name, tensor in trace.kept.items())
    assert math.isnan(again.norm[1])


def test_suspects_are_those_that_the_traces_show() -> None:
    values = np.ones((2, 2, 4))

    def found(config: Config, **fields: Any) -> list[str]:
        base, other = _trace(values, samples_per_epoch=100), _trace(values, 2, samples_per_epoch=100, **fields)
        return candidates([agreement.compare(base, other, 1e-6)], config, steps=2)

    assert found(Config()) == ["dropout"]  # a generator of the model's own leaves no trace: always tried
    assert found(Config(), shares=[[[4], [4]], [[4], [3]]]) == ["uneven shares", "dropout"]
    assert found(Config(exact=4), shares=[[[4, 4], [4, 4]]] * 2) == ["dropout"]
    assert found(Config(accumulate=2), shares=[[[2, 2], [2, 2]]] * 2) == ["accumulation", "dropout"]
    assert found(Config(), images=[0, 7]) == ["augmentation", "dropout"]
    assert found(Config(), lr=[[0.1], [0.2]], batch_norm=True) == ["learning rate", "batch statistics", "dropout"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(1, 300), st.integers(1, 4), st.booleans())
def test_an_even_batch_is_divided_by_all(processes: list[int], batch: int, pieces: int, exact: bool) -> None:
    batch = max(batch, pieces)
    config = Config(batch_size=batch, exact=pieces if exact else 0, accumulate=1 if exact else pieces)
    even = even_batch(config, processes)
    assert all(even % (n if exact else n * pieces) == 0 for n in processes)
    assert not exact or even % pieces == 0
    assert even <= batch or even == math.lcm(*processes, *([pieces] if exact else [])) * (1 if exact else pieces)


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


class _Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty(x.shape[0], 1, 1).bernoulli_(0.8).div_(0.8)  # as stochastic depth
        return nn.functional.dropout(x, 0.3, self.training) * noise + torch.rand_like(x) + torch.randn(x.shape)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        _Functional(),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
    ],
)
def test_expected_draws_do_not_depend_on_the_seed(layer: nn.Module) -> None:
    _replace_methods()  # as training does, for good
    x = torch.randn(4, 3, 8)

    def twice() -> list[torch.Tensor]:
        return [layer(x) for seed in (1, 2) if torch.manual_seed(seed)]

    drawn = twice()
    assert not torch.equal(*drawn)  # else this would prove nothing
    with ExpectedDraws():
        expected = twice()
    assert torch.equal(*expected)


def test_expected_dropout_is_the_identity_and_gradients_pass() -> None:
    x = torch.randn(5, requires_grad=True)
    with ExpectedDraws():
        nn.Dropout(0.9)(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(5))


@pytest.mark.parametrize(
    ("ledger", "skipped", "cause"), [(2, 2, "overflow"), (0, 2, "overflow"), (2, 3, "order"), (2, 0, "order")]
)
def test_a_step_that_one_n_leaves_out_is_an_overflow_though_its_samples_are_not_in_the_ledger(
    ledger: int, skipped: int, cause: str
) -> None:
    steps = {"ledger": ledger, "skipped steps": skipped, "shares": 0, "replicas": 0}
    rows = [Row(name, "different" if step else "equal", step=step) for name, step in steps.items()]
    base, other = (SimpleNamespace(processes=n, skipped=[n == 1] * 3, steps_per_epoch=2) for n in (1, 2))
    (found,) = _from_traces(Comparison(base, other, rows))  # type: ignore[arg-type]
    assert found.suspects == (cause,)
