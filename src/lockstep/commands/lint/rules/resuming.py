"""Rules about resuming: whether a run that goes on is the same run."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import lacking as lacking_in_fabric
from lockstep.commands.lint.rules.by_fabric import unregistered
from lockstep.commands.lint.rules.by_ignite import lacking_in_ignite
from lockstep.commands.lint.rules.by_trainers import weights_alone
from lockstep.commands.lint.rules.forgotten import never_loaded
from lockstep.commands.lint.rules.kept import written
from lockstep.commands.lint.rules.parties import named_in, roles, schedulers
from lockstep.commands.lint.rules.restored import epoch_loops, knows_the_file, resumes
from lockstep.commands.lint.rules.states import as_save
from lockstep.commands.lint.several import comes_by, library, lightning
from lockstep.commands.lint.tree import text_of


@rule(
    "LS404",
    "state-not-saved",
    "what a resumed run needs is not in the checkpoint",
    result="a resumed run is another one: momentum starts from 0, the schedule or the epochs from the beginning",
    why="the program resumes from a file that lacks it",
    mend='torch.save({"model": ..., "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),\n'
    '            "scaler": scaler.state_dict(), "epoch": epoch}, path)',
)
def state_not_saved(program: Program) -> Iterator[Hit]:
    """A program that resumes, whose checkpoint has no optimizer, scheduler, scaler or epoch."""
    yield from lacking_in_fabric(program)
    yield from unregistered(program)
    yield from lacking_in_ignite(program)
    yield from weights_alone(program)
    states = bool(program.named.get("save_state"))
    if states or library(program, "deepspeed", "ignite") or lightning(program) or not step_loops(program):
        return
    if not resumes(program):
        return
    yield from never_loaded(program)
    kept = written(program)
    if not kept or any(text is None for _, text in kept):
        return
    told = [(call, _lacking(program, call, text or "")) for call, text in kept]
    call, lacking = min(told, key=lambda each: len(each[1]))
    lacking = [each for each in lacking if all(each in others for _, others in told)]  # a part may be a file of its own
    if lacking:
        yield Hit(call, f"without {', '.join(lacking)}")


def _lacking(program: Program, call: ast.Call, text: str) -> list[str]:
    """What a saved text does not mention of what the program has."""
    lacking = []
    if not re.search(r"optim|opt\b|\bopt_|['\"]opt", text) and not named_in(program, "optimizer", text):
        lacking.append("optimizer")
    kept = bool(re.search(r"sched", text)) or named_in(program, "scheduler", text)
    if _scheduled(program) and not _stepped_again(program) and not kept:
        lacking.append("scheduler")
    scalers = [each for each, role in roles(program).items() if role == "scaler" and isinstance(each, ast.Call)]
    enabled = any(constant(program, given(program, each, "enabled")) is not False for each in scalers)
    if enabled and not re.search(r"scaler|amp", text) and not named_in(program, "scaler", text):
        lacking.append("scaler")
    path = given(program, as_save(program, call), "f", 1)
    named = " ".join(text_of(made) for made in origins(program, path)) if path is not None else ""
    if not re.search(r"epoch|step|iter", text + named) and not any(
        knows_the_file(program, each) for each in epoch_loops(program)
    ):
        lacking.append("epoch")
    return lacking


def _scheduled(program: Program) -> bool:
    """Whether a schedule counts its own steps, and nobody tells it where it stands."""
    told = any(text.endswith(".last_epoch") for source in program.sources for text in source.attributes) or any(
        len(call.args) == 1 and "epoch" in text_of(call.args[0]) for call in program.named.get("step", [])
    )
    return not told and any(
        comes_by(program, each) and given(program, each, "last_epoch") is None for each in schedulers(program)
    )


def _stepped_again(program: Program) -> bool:
    """Whether a loop does nothing but step: a schedule brought to where the run had stopped."""
    for call in program.named.get("step", []):
        source = program.owner[call]
        outer = source.parents[source.parents[call]] if isinstance(source.parents[call], ast.Expr) else None
        if isinstance(outer, ast.For) and all(_only_steps(each) for each in outer.body):
            return True
    return False


def _only_steps(node: ast.stmt) -> bool:
    """`plan.step()`, `next(momenta)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) in ("step", "next")
