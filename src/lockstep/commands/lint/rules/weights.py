"""First weights that each rank draws for itself, where nothing sends them around."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.order import Step, passed
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.seeding import by_rank, seed_of, seeded_alike, torch_seeds
from lockstep.commands.lint.source import Function

_SENDS = ("broadcast", "broadcast_object_list", "set_model_state_dict", "set_state_dict", "load_state_dict")


def weights_apart(program: Program) -> Iterator[Hit]:
    """A model made after a seed of the rank's, or none, and cut by fully_shard or FSDP, which send no weights."""
    for name in ("fully_shard", "FullyShardedDataParallel", "FSDP"):
        for call in program.named.get(name, []):
            synced = constant(program, given(program, call, "sync_module_states")) not in (..., False)
            given_sync = given(program, call, "sync_module_states")
            if not call.args or synced or (given_sync is not None and constant(program, given_sync) is ...):
                continue
            for made in origins(program, call.args[0]):
                if isinstance(made, ast.Call) and _apart(program, made):
                    yield Hit(made, f"other weights on each rank, and {name} sends none")
                    return


def _apart(program: Program, made: ast.Call) -> bool:
    """Whether ranks draw at a place from generators that differ, and nothing makes the result equal after that."""
    for start in _starts(program):
        steps = _calls(program, start)
        place = next((n for n, step in enumerate(steps) if step.node is made), None)
        if place is None:
            continue
        seeds = set(torch_seeds(program))
        before = [step.node for step in steps[:place] if step.node in seeds]
        own = [each for each in before if isinstance(each, ast.Call) and definition(program, each.func) is None]
        own = [each for each in own if seed_of(each) is not None and "cuda" not in qualified(program, each.func)]
        if any(not step.conditions for step in steps[place:] if last_name(_function(step.node)) in _SENDS):
            return False
        return by_rank(program, own[-1]) if own else _never_seeded(program, made)
    return False


def _never_seeded(program: Program, made: ast.Call) -> bool:
    text = program.owner[made].text
    trains = bool(program.named.get("step"))
    return (
        trains
        and not program.named.get("load_state_dict")
        and not seeded_alike(program)
        and not re.search(r"meta|from_pretrained|seed", text)
    )


def _function(node: ast.AST) -> ast.AST:
    return node.func if isinstance(node, ast.Call) else node


def _starts(program: Program) -> list[ast.AST]:
    return [program.root.tree, *(each for each in program.root.nodes if isinstance(each, Function))]


@remembered
def _calls(program: Program, start: ast.AST) -> list[Step]:
    return [step for step in passed(program, start) if isinstance(step.node, ast.Call)]
