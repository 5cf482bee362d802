"""From a script to its recipe: record, write, replay, and in float64 where float32's rounding hides the answer."""

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file

from lockstep.commands.reproduce.experiment import Experiment, read
from lockstep.commands.reproduce.program import TENSORS, module_text, program_text
from lockstep.commands.reproduce.recipe import WEIGHTS, Recipe, as_toml, recipe_of
from lockstep.commands.reproduce.replay import Replayed, departs, plain, rates_apart, replay
from lockstep.commands.reproduce.start import Plan, Reproduce, record
from lockstep.distributed.output import status
from lockstep.errors import UserError

TOLERANCE = {False: 1e-4, True: 1e-9}  # of losses, relative, over some steps; in float64


@dataclass(frozen=True)
class Proof:
    """The losses of the script and of Lockstep's replays, in float32 or in float64."""

    experiment: Experiment
    replays: list[Replayed]
    double: bool

    @property
    def departed(self) -> int:
        """The first step from which on a loss is not the script's until rounding, from 0; -1: none."""
        found = [departs(each, self.experiment.steps, TOLERANCE[self.double]) for each in self.replays]
        return min((each for each in found if each >= 0), default=-1)


@dataclass(frozen=True)
class Found:
    """What came of a script. `why_not`: why there is no proof in float64 where one was wanted."""

    draft: Recipe
    proofs: list[Proof]  # the last one decides
    rates: float  # largest relative difference of the recipe's rates and the script's; -1: not compared
    why_not: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the losses are equal until rounding."""
        return self.proofs[-1].departed < 0


def reproduced(chosen: Reproduce, script: Path, args: list[str], out: Path) -> Found:
    """Write a script's experiment to a folder, and prove it."""
    with tempfile.TemporaryDirectory(prefix="lockstep-reproduce-") as folder:
        status(f"running {script.name}")
        plan = Plan(folder, str(script), chosen.steps, chosen.timeout)
        experiment = read(script, Path(folder), record(plan, args, chosen.nproc, chosen.gpus))
        draft = recipe_of(experiment)
        _write(experiment, draft, out)
        config = plain(draft.config)
        status("replaying")
        replays = [replay(experiment, config, out, n, not draft.random_pixels) for n in chosen.compare]
        found = Found(draft, [Proof(experiment, replays, False)], rates_apart(experiment, draft, out))
        if not found.agrees:
            found = _in_float64(found, replace(plan, double=True), chosen, args, out)
    proofs = [
        {
            "type": "float64" if proof.double else "float32",
            "script": [step.loss for step in proof.experiment.steps],
            "lockstep": {str(each.processes): each.losses for each in proof.replays},
            "ids": [step.ids.tolist() for step in proof.experiment.steps],
        }
        for proof in found.proofs
    ]
    (out / "proof.json").write_text(json.dumps(proofs, indent=1), encoding="utf-8")
    return found


def _in_float64(found: Found, plan: Plan, chosen: Reproduce, args: list[str], out: Path) -> Found:
    """The same once more in float64, where the script runs so: rounding begins a billion times smaller there."""
    try:
        experiment = read(Path(plan.script), Path(plan.folder), record(plan, args, chosen.nproc, chosen.gpus))
    except UserError as error:
        return replace(found, why_not=error.message)
    config = plain(recipe_of(experiment).config)
    replays = [replay(experiment, config, out, n, False, double=True) for n in chosen.compare]
    return replace(found, proofs=[*found.proofs, Proof(experiment, replays, True)])


def _write(experiment: Experiment, draft: Recipe, out: Path) -> None:
    text = module_text(experiment, draft)
    shutil.rmtree(out / "__pycache__", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "parts.py").write_text(text, encoding="utf-8")
    about = [f"What {experiment.script.name} trains: `lockstep train --config recipe.toml` in this folder."]
    if draft.needs_program:
        (out / "train.py").write_text(program_text(experiment, draft), encoding="utf-8")
        about.append("Its schedule is none of the flags': train.py has it, and the rate here stays the first one.")
    (out / "recipe.toml").write_text(as_toml(draft.config, about), encoding="utf-8")
    save_file(experiment.initial, out / WEIGHTS)
    if experiment.parts:
        save_file(experiment.parts, out / TENSORS)
