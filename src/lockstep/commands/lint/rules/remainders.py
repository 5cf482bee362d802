"""The rule about the last, shorter group of passes: it has to make an update too."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.places import inside, loops, over_loader, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.groups import whole_windows
from lockstep.commands.lint.rules.windows import Accumulation, accumulations, bound, updates_weights
from lockstep.commands.lint.source import Function, Loop, parameters
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS202",
    "remainder-dropped",
    "the last, shorter group of accumulated passes makes no update",
    result="with 782 batches and k = 4 the last 2 batches' gradients are dropped, or enter the next epoch's first "
    "update",
    why="the step runs where (i + 1) % k == 0 alone, and nothing runs it after the loop",
    mend="if (i + 1) % accumulate == 0 or i + 1 == len(loader):\n    optimizer.step()",
)
def remainder_dropped(program: Program) -> Iterator[Hit]:
    """Accumulation by `%` alone over a loader, and no step after the loop."""
    yield from (Hit(node) for node in dict.fromkeys(whole_windows(program)))
    told = set[ast.If]()
    for each in accumulations(program):
        over = _by_number(program, each) if isinstance(each.loop, Function) else over_loader(program, each.loop)
        if isinstance(each.loop, ast.While) or not over or each.when in told:
            continue
        told_more = [part for part in each.meant if not isinstance(part, ast.Name | ast.Attribute)] or each.meant
        text = " ".join(text_of(part) for part in told_more)
        calls = (node for node in inside(program, each.loop) if isinstance(node, ast.Call))
        shorter = {call for call in calls if last_name(call.func) == "min"}
        flag = any(_is_more(node) for part in each.meant for node in walk(part)) or depends(
            program, each.when.test, shorter.__contains__
        )  # the length of a group, or of what is left
        if flag or re.search(r"len\(|last|num_batches|total|end\b|final", text) or _whole_groups(program, each):
            continue
        if not (_otherwise(program, each) or _goes_on(program, each) or _after(program, each)):
            told.add(each.when)
            yield Hit(each.when)


def _by_number(program: Program, each: Accumulation) -> bool:
    """Whether Lightning's step goes by the batch's number, which begins anew in each epoch of unknown length."""
    given = parameters(each.loop)[2:3] if isinstance(each.loop, Function) and each.loop.name == "training_step" else []
    cut = any(part.arg == "limit_train_batches" for call in program.calls for part in call.keywords)
    return not cut and any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and any(isinstance(part, ast.Name) and part.id == given[0].arg for part in walk(node.left))
        for meant in each.meant
        if given
        for node in walk(meant)
    )


def _after(program: Program, each: Accumulation) -> bool:
    """Whether an update runs past the loop: in its function, or anywhere outside of loops over batches."""
    batches, within = step_loops(program), set(inside(program, each.loop))
    for call in program.named.get("step", []):
        own = isinstance(each.loop, Function) and call in within
        past = any(not set(path) & set(batches) for path in loops(program, call))
        if past and not own and updates_weights(program, call):
            return True
    last = each.loop.end_lineno or 0
    return isinstance(each.loop, Loop) and any(
        last_name(one.func) == "step" and one.lineno > last and "sched" not in text_of(one.func)
        for one in own_nodes(program, each.loop)
        if isinstance(one, ast.Call)
    )


def _otherwise(program: Program, each: Accumulation) -> bool:
    """Whether a name in the condition has another meaning too, in another branch, which counts in another way."""
    for name in each.meant:
        known = bindings(program, name, name.id) if isinstance(name, ast.Name) else []
        values = [one.value for one in known if one.kind == "value" and one.value is not None]
        counts = [any(isinstance(part, ast.Mod) for part in walk(value)) for value in values]
        if len(values) > 1 and any(counts) and not all(counts):
            return True
    return False


def _goes_on(program: Program, each: Accumulation) -> bool:
    """Whether the groups go on over epochs: a loop that begins anew by itself, or a counter that isn't set back."""
    if not isinstance(each.loop, ast.For):
        return False
    if any(last_name(node) in ("cycle", "count", "repeat") for node in walk(each.loop.iter)):
        return True
    if any(isinstance(node, ast.While) for node in inside(program, each.loop.iter)):
        return True
    return any(
        _runs_on(program, node.left, each.loop)
        for part in each.meant
        for node in walk(part)
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)) or isinstance(node, ast.Compare)
    )


def _runs_on(program: Program, number: ast.expr, loop: Loop) -> bool:
    """Whether a number is counted up in a loop, and set back in none around it, as the gradients are."""
    around, within = step_loops(program).get(loop, []), set(inside(program, loop))
    for node in walk(number):
        known = bound(program, node)
        counted = any(each.kind == "aug" for each in known)
        if not around or not counted or not all(each.kind in ("aug", "value") for each in known):
            continue
        emptied = [each for each in program.named.get("zero_grad", []) if each not in within]
        places = [each.node for each in known if each.kind == "value" and each.node not in within]
        return not any(set(path) & set(around) for place in [*places, *emptied] for path in loops(program, place))
    return False


def _is_more(node: ast.AST) -> bool:
    """A second condition, or a length: what lets the last group in."""
    either = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
    return either or (isinstance(node, ast.Call) and last_name(node.func) == "len")


def _left_out(program: Program, each: Accumulation) -> bool:
    """Whether passes past the last whole group are skipped: `if i // k >= updates: continue`."""
    every = ast.dump(each.every)

    def groups(node: ast.AST) -> bool:
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and ast.dump(node.right) == every

    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], ast.Continue | ast.Break)
        and depends(program, node.test, groups)
        for node in each.loop.body
    )


def _whole_groups(program: Program, each: Accumulation) -> bool:
    """Whether the loop's passes are cut to a multiple of k: islice, a floor division, or a length that is set."""
    text = text_of(each.loop.iter) if isinstance(each.loop, ast.For) else ""
    if "islice" in text or "//" in text or _left_out(program, each):
        return True
    whole = "\n".join(source.text for source in program.sources)
    return bool(re.search(r"len\(\w+\)\s*%\s*accum|//\s*accum\w*\s*\*\s*accum", whole))
