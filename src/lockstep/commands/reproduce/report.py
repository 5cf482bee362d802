"""From a script to its recipe: the whole way, and what is said of it."""

import json
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from lockstep.commands.lint.check import check
from lockstep.commands.lint.rule import RULES
from lockstep.commands.reproduce import parts, replay
from lockstep.commands.reproduce.experiment import Experiment, read
from lockstep.commands.reproduce.recipe import WEIGHTS, Recipe, as_toml, recipe_of
from lockstep.commands.reproduce.settings import Reproduce
from lockstep.commands.reproduce.start import Plan, record
from lockstep.processes.output import status

_TOLERANCE = 1e-4  # relative, of losses over some steps in float32


def reproduce(chosen: Reproduce, script: Path, args: list[str]) -> bool:
    """Record, write, replay and report; whether the losses agree until rounding."""
    out = Path(chosen.out or f"{script.stem}-lockstep").absolute()
    with tempfile.TemporaryDirectory(prefix="lockstep-reproduce-") as folder:
        status(f"running {script.name}")
        records = record(Plan(folder, str(script), chosen.steps, chosen.seconds), args, chosen.nproc)
        experiment = read(script, Path(folder), records)
    made = recipe_of(experiment)
    text = parts.module_text(experiment, made)
    out.mkdir(parents=True, exist_ok=True)
    (out / "parts.py").write_text(text, encoding="utf-8")
    (out / "recipe.toml").write_text(as_toml(made.config, [f"What {script.name} trains."]), encoding="utf-8")
    save_file(experiment.initial, out / WEIGHTS)
    if experiment.parts:
        save_file(experiment.parts, out / parts.TENSORS)
    config = replay.plain(made.config)
    found = [replay.replay(experiment, config, out, n, not made.random_pixels) for n in chosen.compare]
    lines, agree = _report(experiment, made, found)
    print("\n".join(lines))
    where = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    print(f"\nwritten to {where}: recipe.toml, parts.py, {WEIGHTS}, proof.json")
    print(f"train it: cd {where} && lockstep train --config recipe.toml")
    steps = experiment.steps
    proof = {"script": [step.loss for step in steps], "ids": [step.ids.tolist() for step in steps]}
    runs = {str(each.processes): each.losses for each in found}
    (out / "proof.json").write_text(json.dumps(proof | {"lockstep": runs}, indent=1), encoding="utf-8")
    return agree


def _report(experiment: Experiment, made: Recipe, found: list[replay.Replayed]) -> tuple[list[str], bool]:
    steps, record, config = experiment.steps, experiment.record, made.config
    heads = "".join(f"{f'lockstep N={each.processes}':>16}" for each in found)
    processes = f"{experiment.world} process{'es' if experiment.world != 1 else ''}"
    lines = [
        f"{experiment.script.name}: {record['model']['name']} on {processes}, {experiment.batch_size} samples a step "
        f"of {experiment.train['length']:,}, {config.epochs} epochs",
        "",
        "losses of the same samples from the same weights",
        f"{'step':>6}{'script':>14}{heads}  difference",
    ]
    for number, step in enumerate(steps):
        ours = [each.losses[number] for each in found]
        worst = max(replay.relative(value, step.loss) for value in ours)
        row = "".join(f"{value:>16.8f}" for value in ours)
        lines.append(f"{number + 1:>6}{step.loss:>14.8f}{row}{worst:>12.1e}")
    departed = [each for each in (replay.departs(one, steps, _TOLERANCE) for one in found) if each >= 0]
    lines += ["", f"first weights: {_equal(found[0].weights)}"]
    if found[0].pixels >= 0:
        lines.append(f"images as the recipe reads them: {_equal(found[0].pixels)}")
    else:
        lines.append("images: the script's own, as its transforms drew them; the recipe draws its own")
    if departed:
        lines.append(f"the losses part at step {min(departed) + 1}: something of the script is not in the recipe")
    else:
        lines.append(f"losses: equal until rounding over {len(steps)} steps")
    lines += _differences(experiment, made)
    return lines, not departed


def _equal(difference: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1e} apart at most"


def _differences(experiment: Experiment, made: Recipe) -> list[str]:
    lines = ["", "different on purpose:"]
    lines += [f"  {each}" for each in [*_faults(experiment), *_meant(experiment, made)]]
    lines += ["", "not taken over:", *(f"  {each}" for each in made.lost or ["nothing that was seen"])]
    return lines


def _faults(experiment: Experiment) -> list[str]:
    """The script's faults, by lint's codes."""
    findings, _ = check([experiment.script], frozenset(RULES))
    lines = [f"{each.code} line {each.line}: {RULES[each.code].title}" for each in findings]
    if experiment.loss_factor != 1 and not any(line.startswith("LS201") for line in lines):
        lines.append(f"LS201: gradients {experiment.loss_factor:.3g} times those of the mean: replayed, not copied")
    return lines


def _meant(experiment: Experiment, made: Recipe) -> list[str]:
    lines, train = [], experiment.train
    if len(train["firsts"]) > 1 and train["firsts"][0] == train["firsts"][1]:
        lines.append("order: the script reads the same samples in the same order in each epoch; the recipe shuffles")
    lines.append("order: a keyed permutation, the same on any number of processes, instead of torch's sampler")
    if experiment.record["draws"]:
        lines.append("dropout and what else forward draws: keyed by sample, in both columns; not torch's generator")
    if experiment.world > 1:
        lines.append(
            f"--batch-size {experiment.batch_size} is that of all processes together; the script's loader has "
            f"{experiment.per_pass} a process"
        )
    return lines + made.meant
