"""Rules about what each step waits for."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.places import backwards, inside, loops, over_loader, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.roles import lightning
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_ignite import engine_step
from lockstep.commands.lint.rules.by_ignite import waits as waits_by_ignite
from lockstep.commands.lint.rules.by_lightning import waits_in_steps
from lockstep.commands.lint.source import Function, above, function_of, statement_of


@rule(
    "LS309",
    "barrier-each-step",
    "a barrier in each step",
    result="each step waits for the slowest rank twice, and for the device: some percent to half of the speed; nothing "
    "is any safer",
    why="DDP's all-reduce of the gradients already lets all ranks wait for each other",
    mend="loss.backward()\noptimizer.step()  # without barrier()",
)
def barrier_each_step(program: Program) -> Iterator[Hit]:
    """barrier() or wait_for_everyone() in a step loop, under no condition."""
    yield from waits_by_ignite(program)
    for function in program.methods.get("training_step", []) if lightning(program) else []:
        calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
        yield from (Hit(each) for each in calls if last_name(each.func) == "barrier")
    for loop in step_loops(program):
        for name in ("barrier", "wait_for_everyone"):
            for call in program.named.get(name, []):
                if _each_pass(program, call, loop):
                    statement = statement_of(program.owner[call], call)
                    yield Hit(call if not isinstance(statement, ast.Expr) else statement)
        for node in ast.walk(loop):
            called = callee(program, node) if isinstance(node, ast.Call) else None
            if called is not None and _only_waits(called) and _each_pass(program, node, loop):
                yield Hit(node)


def _only_waits(function: Function) -> bool:
    """Whether a function is a barrier where there are several processes: `if is_initialized(): barrier()`."""
    body = [each for each in function.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    match body:
        case [ast.If(test=test, body=[ast.Expr(value=ast.Call(func=called))], orelse=[])]:
            several = re.search(r"is_initialized|is_available|world_size|distributed", ast.unparse(test))
            return bool(several) and last_name(called) == "barrier"
    return False


def _each_pass(program: Program, node: ast.AST, loop: ast.AST) -> bool:
    """Whether each pass of a loop comes by: within it, itself or by the functions that it calls, under no condition."""
    source = program.owner[node]
    for outer in above(source, node):
        if outer is loop:
            return True
        if isinstance(outer, ast.If | ast.IfExp | ast.Try | ast.Lambda | ast.While):
            return False
        if isinstance(outer, ast.For) and not over_loader(program, outer):
            return False
        if isinstance(outer, Function):
            return any(
                path and path[0] is loop and not _conditional_call(program, outer, loop)
                for path in loops(program, node)
            )
    return False


def _conditional_call(program: Program, function: Function, loop: ast.AST) -> bool:
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and callee(program, node) is function:
            return any(
                isinstance(each, ast.If) for each in above(program.owner[node], node) if each in set(ast.walk(loop))
            )
    return True


@rule(
    "LS310",
    "sync-each-step",
    "each step waits for the GPU",
    result="the CPU can't queue the next step while the GPU works: small networks lose 10 to 40 % of their speed",
    why=".item(), .cpu() and print of a GPU's tensor wait until it is computed",
    mend="total += loss.detach()  # on the device; total.item() once, after the loop or each 100 steps",
)
def sync_each_step(program: Program) -> Iterator[Hit]:
    """.item(), .cpu(), float(loss) or print of the loss in each training step on a GPU."""
    yield from waits_in_steps(program)
    if lightning(program) or not any(
        re.search(r"cuda|Accelerator\(|Fabric\(|hvd|device_ids|nccl", source.text) for source in program.sources
    ):
        return
    for loop in step_loops(program):
        for node in inside(program, loop):
            if isinstance(node, ast.Call) and _waits(program, node) and _each_pass(program, node, loop):
                if _watched(program, node):
                    break
                yield Hit(node)
                break
    for call in program.named.get("Engine", []):  # Ignite's loop runs this function in each step
        step = engine_step(program, call)
        if step is not None and any(each in set(ast.walk(step)) for each in backwards(program)):
            for node in ast.walk(step):
                if isinstance(node, ast.Call) and _waits(program, node) and not _conditional_in(program, node, step):
                    yield Hit(node)
                    break


def _watched(program: Program, node: ast.Call) -> bool:
    """Whether a value is fetched to stop the run where it is no number: on purpose."""
    function = function_of(program.owner[node], node)
    statement = statement_of(program.owner[node], node)
    names = {each.id for each in getattr(statement, "targets", []) if isinstance(each, ast.Name)}
    return any(
        isinstance(each, ast.Call)
        and last_name(each.func) in ("isfinite", "isnan", "isinf")
        and (names & {one.id for one in ast.walk(each) if isinstance(one, ast.Name)} or node in ast.walk(each))
        for each in ast.walk(function or program.root.tree)
    )


def _conditional_in(program: Program, node: ast.AST, function: Function) -> bool:
    for outer in above(program.owner[node], node):
        if outer is function:
            return False
        if isinstance(outer, ast.If | ast.IfExp):
            return True
    return False


def _waits(program: Program, call: ast.Call) -> bool:
    name = last_name(call.func)
    if name in ("item", "cpu", "tolist", "numpy") and isinstance(call.func, ast.Attribute) and not call.args:
        owner = call.func.value
        text = ast.unparse(owner)
        if isinstance(owner, ast.Name):  # mean.item(), where mean = reduce(loss)
            found = reaching(program, owner, bindings(program, owner, owner.id))
            text += "".join(ast.unparse(each.value) for each in found if each.kind == "value" and each.value)
        return bool(re.search(r"loss|correct|acc|pred|output|logit|sum\(|==|eq\(|norm", text)) and not re.search(
            r"\.cpu\(\)|labels?$|target$", text
        )
    if name in ("print", "float") and isinstance(call.func, ast.Name):
        return any(
            isinstance(each, ast.Name) and re.search(r"^(loss|losses|train_loss)$", each.id)
            for part in call.args
            for each in ast.walk(part)
        )
    return False
