"""--accumulate auto, with pretended memory: by doubling, the same on all ranks, kept by the run that goes on."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.commands.shared.arguments import planned
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.training import fit
from lockstep.training.loop import train
from lockstep.training.step import TrainStep
from tests.journals import read
from tests.ranks import run_ranks

AUTO = Config(
    batch_size=30,
    accumulate=0,
    epochs=1,
    data=DataConfig(dataset="digits", fraction=0.1),  # 144 samples: 5 steps an epoch
    model=ModelConfig(model="mlp"),
    optim=OptimConfig(optimizer="adamw", lr=0.01),
    execution=Execution(eval_batch_size=200),
    recovery=Recovery(checkpoint_every="1epoch", hang_timeout=60),
)
_ROOM = 8  # images that pass at once


def squeezed(world: World, config: Config, folder: str) -> dict[str, Any]:
    """Train on a device that holds passes of so many images; returns what the journal says on rank 0."""
    true = TrainStep._pass
    met: list[int] = []

    def passes(self: TrainStep, model: Any, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        met.append(len(images))
        if len(images) > _ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (pretended)")
        return true(self, model, images, *rest)

    Path(folder, "weights").mkdir(parents=True, exist_ok=True)
    world.barrier()
    memory: dict[str, Any] = {
        "tries": lambda _: True,
        "free_bytes_gib": lambda _: 100.0,
        "peak_gib": lambda _: 12.5,
    }
    with mock.patch.multiple(fit, **memory), mock.patch.object(TrainStep, "_pass", passes):
        train(config, world, Path(folder))
    assert met[0] == -(-30 // world.size), "the whole batch is tried first"
    return {record["kind"]: record for record in read(Path(folder, "journal.jsonl"))}


def test_it_doubles_until_a_step_fits_on_every_rank_and_changes_nothing_that_is_learned(tmp_path: Path) -> None:
    one = squeezed(World.single(), AUTO, str(tmp_path / "one"))
    assert (one["fit"]["tried"], one["fit"]["accumulate"]) == ([1, 2, 4], 4)  # 30, 15 and 8 images at once
    assert (one["fit"]["peak_gib"], one["fit"]["free_gib"]) == (12.5, 100.0)
    assert one["run"]["config"]["accumulate"] == 4
    two = run_ranks(squeezed, 2, AUTO, str(tmp_path / "two"), timeout=240)[0]
    assert (two["fit"]["tried"], two["fit"]["accumulate"]) == ([1, 2], 2)
    given = tmp_path / "given"
    (given / "weights").mkdir(parents=True)
    train(dataclasses.replace(AUTO, accumulate=4), World.single(), given)
    end = read(given / "journal.jsonl")[-1]
    for name in ("weights_sha256", "ledger_sha256", "steps"):
        assert one["end"][name] == end[name], "trying leaves no trace in what is learned"
    assert two["end"]["ledger_sha256"] == end["ledger_sha256"]

    longer = dataclasses.replace(AUTO, epochs=2, recovery=dataclasses.replace(AUTO.recovery, override=("epochs",)))
    train(longer, World.single(), tmp_path / "two")  # elsewhere, and with all the memory: what was found stays
    records = read(tmp_path / "two/journal.jsonl")
    assert [r["config"]["accumulate"] for r in records if r["kind"] == "run"] == [2, 2]
    assert records[-1]["status"] == "completed"
    assert sum(r["kind"] == "fit" for r in records) == 1


@pytest.mark.slow
def test_what_never_fits_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: Any) -> float:
        raise torch.OutOfMemoryError("pretended")

    for name, stand_in in (("tries", lambda _: True), ("attempt", never), ("free_bytes_gib", lambda _: 1.0)):
        monkeypatch.setattr(fit, name, stand_in)
    with pytest.raises(UserError, match=r"a batch of 30 in 16 micro-batches needs more memory") as caught:
        fit.fitted(AUTO, World.single(), tmp_path)
    assert "--activation-checkpointing" in caught.value.remedy
    monkeypatch.setattr(fit, "attempt", lambda trial, _: 2.0 / trial.accumulate)  # fits the device, but for headroom
    config, record = fit.fitted(AUTO, World.single(), tmp_path)
    assert record is not None
    assert (config.accumulate, record["tried"]) == (4, [1, 2, 4])
    assert "4 micro-batch(es), tried 1, 2, 4; a step takes 0.50 of 1.00 GiB" in fit.line(record)


def test_on_a_cpu_it_is_one_and_a_number_is_left_alone(tmp_path: Path) -> None:
    config, record = fit.fitted(AUTO, World.single(), tmp_path)
    assert config == dataclasses.replace(AUTO, accumulate=1)
    assert record is not None
    assert "not tried on a CPU" in fit.line(record)
    given = dataclasses.replace(AUTO, accumulate=3)
    assert fit.fitted(given, World.single(), tmp_path) == (given, None)


def test_the_word_and_what_it_does_not_go_with() -> None:
    for words in (["--accumulate", "auto"], ["--accumulate=auto"]):
        assert split_arguments(words, Config) == ([], ["--accumulate=0"])
    config: Config = planned("train", Config, lambda config: config, ["--accumulate", "auto"], "{}")
    assert config.accumulate == 0
    assert planned("verify", Config, lambda config: config, [], "{}").accumulate == 1
    for words in (["--accumulate", "auto"], ["--epochs", "3", "--accumulate=2", "--accumulate=auto"]):
        with pytest.raises(UserError, match="verify with --accumulate auto"):
            planned("verify", Config, lambda config: config, words, "{}")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"exact": 4}, "--accumulate auto with --exact 4"),
        ({"execution": Execution(strategy="fsdp")}, "--accumulate auto with --strategy fsdp"),
        ({"execution": Execution(model_parallel=2)}, "--accumulate auto with --model-parallel 2"),
        ({"model": ModelConfig(compile=True)}, "--accumulate auto with --compile"),
    ]
    for changed, sentence in refused:
        with pytest.raises(UserError, match=sentence):
            dataclasses.replace(AUTO, **changed)
