"""Rules about what each step waits for."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of, statement_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.each_step import each_step
from lockstep.commands.lint.guards import kept_out
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.several import lightning
from lockstep.commands.lint.splitting import splits
from lockstep.commands.lint.tensors import is_tensor
from lockstep.commands.lint.tree import text_of, walk

_BARRIERS = ("barrier", "wait_for_everyone", "monitored_barrier")


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
    """barrier() or wait_for_everyone() in what each step runs, under no condition but for there being several ranks."""
    barriers = [call for name in _BARRIERS for call in program.named.get(name, [])]
    told = set[ast.AST]()
    for _, nodes in each_step(program) if barriers else []:
        known = {*nodes} & {*barriers}
        for node in nodes if known else []:
            inner = _only_waits(program, node, known)
            if inner in told or node in told or not (inner or node in known) or _of_one_rank(program, node):
                continue
            told |= {node, inner or node}
            statement = statement_of(program.owner[node], node)
            yield Hit(statement if isinstance(statement, ast.Expr) else node)


def _only_waits(program: Program, node: ast.AST, known: set[ast.AST]) -> ast.AST | None:
    """The barrier of a local function that does nothing else but to ask whether there are several processes."""
    function = callee(program, node) if isinstance(node, ast.Call) else None
    calls = [each for each in walk(function) if isinstance(each, ast.Call)] if function is not None else []
    waits = [each for each in calls if each in known]
    asks = r"is_\w*(available|initialized|distributed)$|get_world_size$|is_dist\w*$|barrier"
    return waits[0] if waits and all(re.search(asks, last_name(each.func)) for each in calls) else None


def _of_one_rank(program: Program, node: ast.AST) -> bool:
    """Whether some ranks alone come by, which is another fault."""
    outer = kept_out(program, node)
    return outer is not None and not (isinstance(outer, ast.If) and not splits(program, outer.test))


@rule(
    "LS310",
    "sync-each-step",
    "each step waits for the GPU",
    result="the CPU can't queue the next step while the GPU works: small networks lose 10 to 40 % of their speed",
    why=".item(), .cpu() and print of a GPU's tensor wait until it is computed",
    mend="total += loss.detach()  # on the device; total.item() once, after the loop or each 100 steps",
)
def sync_each_step(program: Program) -> Iterator[Hit]:
    """.item(), .cpu(), float(), print or `if` of what the GPU computes, in each training step."""
    gpu = r"cuda|Accelerator\(|Fabric\(|hvd|device_ids|nccl|torch\.accelerator"
    if not lightning(program) and not any(re.search(gpu, source.text) for source in program.sources):
        return
    told = set[ast.AST]()
    for _, nodes in each_step(program):
        for node in nodes:
            if _waits(program, node):
                if not _watched(program, node) and node not in told:
                    told.add(node)
                    yield Hit(node)
                break


def _watched(program: Program, node: ast.AST) -> bool:
    """Whether a value is fetched to stop the run where it is no number: on purpose."""
    function = function_of(program.owner[node], node)
    statement = statement_of(program.owner[node], node)
    names = {each.id for each in getattr(statement, "targets", []) if isinstance(each, ast.Name)}
    return isinstance(node, ast.Call) and any(
        isinstance(each, ast.Call)
        and last_name(each.func) in ("isfinite", "isnan", "isinf")
        and (names & {one.id for one in walk(each) if isinstance(one, ast.Name)} or node in walk(each))
        and not isinstance(statement, ast.If)
        for each in walk(function or program.root.tree)
    )


def _waits(program: Program, node: ast.AST) -> bool:
    """Whether the CPU waits here until the device has computed a value."""
    match node:
        case ast.If(test=test) | ast.Assert(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return _asked(program, test)
        case ast.FormattedValue(value=value):
            return is_tensor(program, value)
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
            return is_tensor(program, right)
        case ast.Call():
            return _call_waits(program, node)
    return False


def _asked(program: Program, test: ast.expr) -> bool:
    """Whether a condition is a tensor's: it is fetched to choose."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _asked(program, inner)
        case ast.BoolOp(values=[first, *_]):
            return _asked(program, first)
        case ast.Compare() | ast.Call():
            return is_tensor(program, test)
    return False


def _call_waits(program: Program, call: ast.Call) -> bool:
    name = last_name(call.func)
    if name in ("item", "cpu", "tolist", "numpy") and isinstance(call.func, ast.Attribute) and not call.args:
        owner = call.func.value
        text = text_of(owner)
        if isinstance(owner, ast.Name):  # mean.item(), where mean = reduce(loss)
            found = reaching(program, owner, bindings(program, owner, owner.id))
            text += "".join(text_of(each.value) for each in found if each.kind == "value" and each.value)
        if re.search(r"\.cpu\(\)|labels?$|target$", text):
            return False
        return bool(re.search(r"loss|correct|acc|pred|output|logit|sum\(|==|eq\(|norm", text)) or is_tensor(
            program, owner
        )
    if qualified(program, call.func) == "torch.cuda.synchronize":
        return not _measured(program, call)
    values = [*call.args, *(each.value for each in call.keywords)]
    if isinstance(call.func, ast.Name) and name in ("print", "float", "int", "bool", "str"):
        named = any(
            isinstance(each, ast.Name)
            and re.search(r"^(loss|losses|train_loss)$", each.id)
            and not isinstance(program.owner[each].parents[each], ast.Attribute)  # loss.shape
            for part in call.args
            for each in walk(part)
        )
        return (named and name in ("print", "float")) or any(is_tensor(program, each) for each in values)
    if name in ("add_scalar", "set_postfix", "isnan", "isfinite", "isinf") or (name == "format" and _words(call)):
        torchs = qualified(program, call.func).startswith("torch.") or text_of(call.func).startswith("torch.")
        return not torchs and any(is_tensor(program, each) for each in values)
    return False


def _measured(program: Program, call: ast.Call) -> bool:
    """Whether the function of a call measures time: then it waits on purpose. Or takes no step of an optimizer."""
    source = program.owner[call]
    function = function_of(source, call)
    calls = [each for each in walk(function or source.tree) if isinstance(each, ast.Call)]
    timed = any(
        last_name(each.func) in ("time", "perf_counter", "monotonic", "record", "elapsed_time") for each in calls
    )
    return timed or not any(last_name(each.func) == "step" for each in calls)


def _words(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)
