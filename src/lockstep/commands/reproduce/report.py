"""The report on a script's experiment: the losses side by side, what differs on purpose, what is not taken over."""

from pathlib import Path

from lockstep.commands.audit.faults import FAULTS
from lockstep.commands.reproduce.experiment import Experiment
from lockstep.commands.reproduce.proof import Found, Proof, reproduced
from lockstep.commands.reproduce.recipe import WEIGHTS
from lockstep.commands.reproduce.replay import relative
from lockstep.commands.reproduce.start import Reproduce


def reproduce(chosen: Reproduce, script: Path, args: list[str]) -> bool:
    """Record, write, replay and print; whether the losses agree until rounding."""
    out = Path(chosen.out or f"{script.stem}-lockstep").absolute()
    found = reproduced(chosen, script, args, out)
    print("\n".join(text(found)))
    where = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    files = ["recipe.toml", "parts.py", *(["train.py"] if found.draft.needs_program else []), WEIGHTS, "proof.json"]
    command = "python train.py" if found.draft.needs_program else "lockstep train --config recipe.toml"
    print(f"\nwritten to {where}: {', '.join(files)}\ntrain it: cd {where} && {command}")
    return found.agrees


def text(found: Found) -> list[str]:
    """The report's lines."""
    first = found.proofs[0]
    experiment, config = first.experiment, found.draft.config
    epochs = f"{config.epochs} epoch{'s' if config.epochs != 1 else ''}"
    processes = f"{experiment.world} process{'es' if experiment.world != 1 else ''}"
    lines = [
        f"{experiment.script.name}: {experiment.record['model']['name']} on {processes}, {experiment.batch_size} "
        f"samples a step of {experiment.train['length']:,}, {epochs}"
    ]
    for proof in found.proofs:
        lines += ["", *_table(proof)]
    lines += [
        f"stand-in for {each}: the losses above are of invented {'weights' if '.pth' in each else 'pictures'}"
        for each in experiment.record["stand_ins"]
    ]
    lines += ["", f"first weights: {_equal(first.replays[0].weights)}"]
    if first.replays[0].pixels >= 0:
        lines.append(f"images as the recipe reads them: {_equal(first.replays[0].pixels)}")
    else:
        lines.append("images: as the script's transforms drew them; the recipe draws others")
    if found.rates >= 0:
        by_step = found.draft.scheduler or found.draft.table
        lines.append(f"learning rates of {'its steps' if by_step else 'all epochs'}: {_equal(found.rates)}")
    lines.append(_verdict(found))
    lines += ["", "different on purpose:"]
    lines += [f"  {each}" for each in [*_faults(experiment), *_differences(experiment), *found.draft.different]]
    return [
        *lines,
        "",
        "not taken over:",
        *(f"  {each}" for each in found.draft.missing or ["nothing that was seen"]),
    ]


def _table(proof: Proof) -> list[str]:
    kind = " in float64" if proof.double else ""
    digits, width = (12, 20) if proof.double else (8, 16)
    heads = "".join(f"{f'lockstep N={each.processes}':>{width}}" for each in proof.replays)
    title = f"losses of the same samples from the same weights{kind}"
    lines = [title, f"{'step':>6}{'script':>{width}}{heads}  difference"]
    for number, step in enumerate(proof.experiment.steps):
        ours = [each.losses[number] for each in proof.replays]
        row = "".join(f"{value:>{width}.{digits}f}" for value in (step.loss, *ours))
        lines.append(f"{number + 1:>6}{row}{max(relative(value, step.loss) for value in ours):>12.1e}")
    return lines


def _verdict(found: Found) -> str:
    last, count = found.proofs[-1], len(found.proofs[-1].experiment.steps)
    if found.agrees and last.double:
        return (
            f"losses: equal until rounding over {count} steps in float64; in float32 they part at step "
            f"{found.proofs[0].departed + 1}, as rounding grows from step to step"
        )
    if found.agrees:
        return f"losses: equal until rounding over {count} steps"
    why = f"; in float64 the script does not run: {found.why_not}" if found.why_not else ""
    at = last.experiment.record["by_hand"]
    why += f"; its gradients are changed between backward and the step of {at}" if at else ""
    return f"losses: they part at step {last.departed + 1}: something of the script is not in the recipe{why}"


def _equal(difference: float) -> str:
    if difference == float("inf"):
        return "others"
    return "equal" if difference == 0 else f"{difference:.1e} apart at most"


def _faults(experiment: Experiment) -> list[str]:
    """The script's faults that were seen while it ran."""
    seen, train, evaluated = dict[str, str](), experiment.train, experiment.evaluated
    if experiment.loss_factor != 1:
        seen["LS201"] = f"gradients are {experiment.loss_factor:.3g} times those of the mean"
    if experiment.record["clip_scale"] != 1:
        seen["LS207"] = f"they were {experiment.record['clip_scale']:,.0f} times too large"
    forgotten = train["sampler"] == "DistributedSampler" and train["shuffles"]
    repeated = len(train["firsts"]) > 1 and train["firsts"][0] == train["firsts"][1]
    if repeated and forgotten:
        seen["LS101"] = "epoch 2 had epoch 1's order"
    alone = experiment.world > 1 and not experiment.record["reduces"]
    if evaluated and evaluated["sampler"] == "DistributedSampler" and alone:
        seen["LS104"] = f"a rank evaluated {experiment.sampled[0]:,} of {evaluated['length']:,} samples"
    lines = [f"{code}: {FAULTS[code].title} ({number})" for code, number in seen.items()]
    if repeated and not forgotten:
        lines.append("order: the script reads the same samples in the same order in each epoch; the recipe shuffles")
    return lines


def _differences(experiment: Experiment) -> list[str]:
    lines = ["order: a keyed permutation, the same on any number of processes, instead of torch's sampler"]
    if experiment.record["draws"]:
        lines.append("dropout and what else forward draws: keyed by sample, in both columns; not torch's generator")
    if experiment.world > 1:
        lines.append(
            f"--batch-size {experiment.batch_size} is that of all processes together; the script's loader has "
            f"{experiment.per_pass} a process"
        )
    return lines
