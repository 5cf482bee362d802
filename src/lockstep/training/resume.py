"""Going on from a checkpoint: find it, refuse what is not the same experiment, restore."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint import weights
from lockstep.checkpoint.carried import hand_over, lost_line, moved_since
from lockstep.checkpoint.restore import Loaded, newest, open_checkpoint, restore
from lockstep.checkpoint.store import list_checkpoints, tidy
from lockstep.config import Config
from lockstep.config.changes import follows_epochs
from lockstep.config.fields import diff_configs
from lockstep.distributed.files import atomic_write, named
from lockstep.distributed.resize import HANDOVER
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring import journal
from lockstep.parallel.determinism import rounding
from lockstep.training.assemble import Run
from lockstep.training.state import State, require_whole

# A position is a number of steps into an order of samples. Under another order it would mean other samples.
_ORDER = (
    "batch_size",
    "seed",
    "data.dataset",
    "data.val_fraction",
    "data.fraction",
    "data.drop_last",
    "samples.balance",
    "samples.aug_repeats",
)


def resume(
    config: Config, world: World, run: Run, folder: Path, sources: dict[str, str] | None = None
) -> tuple[State, str, dict[str, Any]]:
    """Restore the newest good checkpoint into `run`; returns the state, a line that says what was done, and what
    processes before these handed over, if there were any.

    `sources`: digests of the user's own code as it is now, by what it is; a line says what has changed.
    Looks in the run folder, and where a run shall begin with `--resume PATH`, there. Where processes have handed over
    their state, that is taken, and removed.

    Raises:
        UserError: for another experiment (with a diff), where checkpoints there were and none is good, and for a PATH
            where the run folder holds checkpoints of a run that did not begin with it.
    """
    world.status("starting: looking for a checkpoint")
    theirs = world.by_first(lambda: (found := _find(config, folder)) and found.to_dict())
    if theirs is None:
        begun = (folder / "journal.jsonl").exists()
        return State(), f"no checkpoint in {folder} yet: starting from the beginning" if begun else "", {}
    loaded = Loaded.from_dict(theirs)
    require_whole(loaded.state)
    _refuse_another(config, world, run, loaded)
    state = load(run, loaded)
    if os.environ.pop(HANDOVER, ""):
        world.barrier()  # all have read it
        if world.rank == 0:
            shutil.rmtree(loaded.path.parent)
        return state, "", loaded.state["resize"]
    if state.steps > config.epochs * len(run.train):
        raise UserError(
            f"{loaded.path}: {state.epochs} epochs are behind it, and --epochs is {config.epochs}",
            f"Give at least --epochs {state.epochs}, or start another run with --out.",
        )
    if loaded.path.resolve().parent.parent != folder.resolve() and not _bring_best(state, world, loaded, folder):
        state.best, state.best_step = None, 0  # the best is then that of what this run will have seen
    if loaded.state["config"].get("selection", {}).get("keep_best") != config.selection.keep_best:  # --override
        state.goal, state.waited = None, 0
        state.best, state.best_step = None, 0
    bad = "".join(f"\ndamaged and set aside: {name} ({reason})" for name, reason in loaded.set_aside)
    lost = loaded.state.get("lost", [])
    note = f"\nnote: {lost_line(lost)}" if lost else ""
    then, now = loaded.state.get("sources", {}), sources or {}
    if changed := [each for each in now if then.get(each, now[each]) != now[each]]:
        note += f"\nnote: since step {state.steps} {', '.join(changed)} has changed: the run goes on by the new one"
    return state, f"resumed from step {state.steps} ({loaded.path}){bad}{note}", {}


def carried(run: Run) -> tuple[dict[str, Any], list[str]]:
    """What has moved since the start and is in no state_dict, for a checkpoint's JSON; and what can't go there."""
    return moved_since(run.began, run.hidden(), run.model, run.step.optimizer, run.ema)


def load(run: Run, loaded: Loaded) -> State:
    """Copy a checkpoint into the run's objects; returns the state that it held."""
    optimizer = run.step.optimizer
    live = {name for group in optimizer.param_groups for name in group} - {"params"}
    saved = restore(loaded, run.model, optimizer, run.step.scaler, run.ema, keep=live)
    run.step.sync.restart()
    hand_over(run.hidden(), saved.get("hidden", {}), run.model)
    run.step.host_generators.used = saved.get("host_draws") or run.step.host_generators.used
    return State.from_dict(saved["progress"], len(run.train))


def to_assemble(config: Config, world: World, folder: Path) -> Config:
    """The config to assemble a run by, on all ranks; a file that one began with may be gone when it goes on.

    It goes on where `resume` will find a checkpoint or raise, so that the initial weights don't matter.
    """
    named = config.recovery.resume not in ("auto", "never")
    goes_on = named or HANDOVER in os.environ or bool(list_checkpoints(folder / "checkpoints"))
    if not world.gather(goes_on)[0]:
        return config
    return replace(config, model=replace(config.model, init=""))


def _bring_best(state: State, world: World, loaded: Loaded, folder: Path) -> bool:
    """Copy the other run's best weights, if they are still those that the checkpoint means; the same on all ranks."""
    brought = False
    source = loaded.path.parent.parent / "weights" / "best.safetensors"
    if world.rank == 0 and source.is_file() and weights.read_metadata(source).get("step") == str(state.best_step):
        with atomic_write(folder / "weights" / "best.safetensors") as temporary:
            shutil.copyfile(source, temporary)
        brought = True
    return bool(world.gather(brought)[0])


def _find(config: Config, folder: Path) -> Loaded | None:
    if handover := os.environ.get(HANDOVER):
        return open_checkpoint(Path(handover))
    checkpoints = folder / "checkpoints"
    if checkpoints.exists():
        tidy(checkpoints)
        if (loaded := newest(checkpoints, digests(folder))) is not None:
            _refuse_a_second_beginning(config, folder, loaded)
            return loaded
    if config.recovery.resume in ("auto", "never"):
        if _completed(config, folder):
            raise UserError(
                f"{folder} holds a complete run and no checkpoint to go on from", "Name another folder with --out."
            )
        return None
    source = named(config.recovery.resume)
    if (source / "manifest.json").exists():
        source = source.resolve()
        number = source.name.rpartition("-")[2]  # of any folder: what is in it has to say the same step
        return open_checkpoint(source, digests(source.parent.parent).get(int(number) if number.isdecimal() else 0))
    if (source / "checkpoints").exists() and (loaded := newest(source / "checkpoints", digests(source))) is not None:
        return loaded
    raise UserError(f"--resume {source}: no checkpoint there", "Name a run folder or one of its checkpoints/step-...")


def _refuse_a_second_beginning(config: Config, folder: Path, loaded: Loaded) -> None:
    """`--resume PATH` says where a run begins; given again, as a scheduler does, it is no news to that run."""
    named = config.recovery.resume
    require_whole(loaded.state)
    begun = loaded.state["config"].get("recovery")
    if named in ("auto", "never") or (isinstance(begun, dict) and begun.get("resume") == named):
        return
    raise UserError(
        f"--resume {named}: the run folder {folder} holds checkpoints of its own, the newest of step {loaded.step}",
        "Begin another run from there with --out, or leave --resume out to go on from the newest.",
    )


def _completed(config: Config, folder: Path) -> bool:
    """True where a run came to its end: by its journal, which may be damaged, or by its final weights."""
    path, final = folder / "journal.jsonl", folder / "weights" / "final.safetensors"
    records = journal.read(path) if path.exists() else []
    if any(r["kind"] == "end" and r.get("status") == "completed" for r in records):
        return True
    return final.is_file() and weights.read_metadata(final).get("epoch") == str(config.epochs - 1)


def digests(folder: Path) -> dict[int, str]:
    """The manifest digests of a run's checkpoints by step, as its journal has them."""
    path = folder / "journal.jsonl"
    known: dict[int, str] = {}
    for record in journal.Reader(path) if path.exists() else []:
        if record["kind"] == "checkpoint":
            step, digest = record.get("step"), record.get("digest")
            if type(step) is not int or not isinstance(digest, str):
                continue
            if record.get("checksum") == journal.checksum(step, digest):
                known[step] = digest
            continue
        start = record.get("resumed_from" if record["kind"] == "run" else "back_to")
        if type(start) is not int:
            continue
        known = {step: digest for step, digest in known.items() if step <= start}  # the rest is of a course it left
    return known


def _refuse_another(config: Config, world: World, run: Run, loaded: Loaded) -> None:
    """Raise UserError with a diff where the checkpoint belongs to another experiment."""
    saved, now, allowed = loaded.state["config"], config.to_dict(), config.recovery.override
    following = follows_epochs(saved, config)  # warm-up and the like, as --epochs sets them
    allowed += tuple(following if "epochs" in allowed else ())
    order = [line for line in diff_configs(saved, now, ignore=()) if _name(line) in _ORDER]
    others = diff_configs(saved, now, ignore=("execution", "recovery", "recipe", *_ORDER, *allowed))
    if config.selection.patience:  # counted in evaluations
        was, shall_be = ({"eval_every": each.get("execution", {}).get("eval_every")} for each in (saved, now))
        others += diff_configs(was, shall_be, ignore=allowed)
    before, after = loaded.state["data"], run.train.images.fingerprint
    data = [f"contents of {run.train.images.name}: {before[:12]} -> {after[:12]}"] if before != after else []
    exact = bool(config.exact) and "rounding" not in allowed
    kernels = diff_configs(loaded.state["rounding"], rounding(world.device), ignore=()) if exact else []
    if not (order or others or data or kernels):
        return
    if order:
        remedy = f"{', '.join(map(_name, order))} can't change: other samples would be at this position."
    elif data:
        remedy = "Put the data back as it was."
    else:
        names = [name for name in map(_name, others) if name not in following]
        names += ["rounding"] if kernels else []
        remedy = f"Give --override {','.join(names)} if that is meant."
    raise UserError(
        "\n    ".join([f"{loaded.path} is of another experiment (then -> now):", *order, *others, *data, *kernels]),
        f"{remedy} Or start another run with --out.",
    )


def _name(line: str) -> str:
    return line.split(":")[0]
