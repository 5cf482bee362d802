"""Which ranks run a line: tests of the rank, of "am I the main process", and of "are there several processes"."""

from __future__ import annotations

import ast
import re

from lockstep_lint.facts.modules import Scope
from lockstep_lint.facts.program import Program
from lockstep_lint.facts.tree import last_name, literal, words

RANK = re.compile(r"(^|_)(rank|ranks|rank_id|process_index|process_id|proc_id|procid|replica_id)$", re.I)
DEVICE = re.compile(r"^(\w+_)?(gpu|gpu_id|gpuid|gpu_index|device|device_id|dev|cuda)$", re.I)
MAIN = re.compile(
    r"(^|_)(is_?)?(local_)?(main|master|chief|primary|leader)(_?(process|proc|rank|node|worker|gpu|thread|device|only|ordinal))?(_only)?$"
    r"|rank_?(zero|0)|(global|local)_zero|(main|master|primary)_?proc|is_root|on_master|first_(rank|proc)",
    re.I,
)
SEVERAL = re.compile(
    r"dist(ributed)?$|^dist|_dist_|distributed|ddp|multi_?(gpu|proc|node)|world_?size|n_?gpus?$|num_(gpus|replicas|processes|nodes)|parallel"
    r"|is_(initialized|available_and)|horovod|hvd|launcher|device_count|slurm|fsdp",
    re.I,
)
RANK_CALLS = frozenset(
    "get_rank rank local_rank get_local_rank get_global_rank get_node_local_rank process_index".split()
)
RANK_VARIABLES = frozenset(
    "RANK LOCAL_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK".split()
)
GUARDS = re.compile(
    r"rank_?zero|(main|master|primary|chief|local_main)_?(process|only|rank)|on_(main|master|rank)|only_on|run_on", re.I
)


def environment(expr: ast.AST) -> str:
    """The environment variable that an expression reads, or an empty text."""
    match expr:
        case ast.Call(func=ast.Name(id="int" | "str"), args=[inner, *_]):
            return environment(inner)
        case ast.Subscript(value=base, slice=ast.Constant(value=str() as name)) if last_name(base) == "environ":
            return name
        case ast.Call(func=ast.Attribute(value=base, attr="get"), args=[ast.Constant(value=str() as name), *_]):
            return name if last_name(base) == "environ" else ""
        case ast.Call(func=function, args=[ast.Constant(value=str() as name), *_]) if last_name(function) == "getenv":
            return name
    return ""


def is_rank(program: Program, expr: ast.expr, scope: Scope, deep: bool = True) -> bool:
    """Whether a value is a process's number (or that of its GPU, which is compared in its place)."""
    if isinstance(expr, ast.Call) and last_name(expr.func) in ("int", "str") and expr.args:
        return is_rank(program, expr.args[0], scope, deep)
    if environment(expr) in RANK_VARIABLES:
        return True
    if isinstance(expr, ast.Call):
        return last_name(expr.func) in RANK_CALLS
    if isinstance(expr, ast.Subscript) and isinstance(expr.slice, ast.Constant):
        return bool(RANK.search(str(expr.slice.value)))
    if isinstance(expr, (ast.Name, ast.Attribute)):
        name = last_name(expr)
        if RANK.search(name) or DEVICE.match(name):
            return True
        return deep and any(
            value.expr is not expr
            and not isinstance(value.expr, (ast.Name, ast.Attribute))
            and is_rank(program, value.expr, value.scope, False)
            for value in program.sources(expr, scope)
        )
    return False


def rank_test(program: Program, test: ast.expr, scope: Scope, deep: int = 2) -> bool | None:
    """True if a test holds on the main rank (or some), False if on the others, None if it is not about the rank."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            if is_rank(program, operand, scope) and not DEVICE.match(last_name(operand)):  # not `not no_cuda`
                return True
            answer = rank_test(program, operand, scope, deep)
            return None if answer is None else not answer
        case ast.BoolOp(values=values):
            answers = [rank_test(program, value, scope, deep) for value in values]
            return next((answer for answer in answers if answer is not None), None)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _compared(program, left, operator, right, scope, deep)
        case ast.NamedExpr(value=value):
            return rank_test(program, value, scope, deep)
        case ast.Name() | ast.Attribute() | ast.Call():
            name = last_name(test)
            target = None if isinstance(test, ast.Call) else program.resolve(test, scope)
            if target and not target.is_property:
                return None  # a function that is not called: always true
            if target and deep:
                answers = [rank_test(program, value, target, deep - 1) for value in target.returns]
                return next((answer for answer in answers if answer is not None), None)
            if MAIN.search(name):
                return True
            if isinstance(test, ast.Name) and RANK.search(name):  # `if rank:`
                return False
            return _by_value(program, test, scope, deep)
    return None


def _compared(
    program: Program, left: ast.expr, operator: ast.cmpop, right: ast.expr, scope: Scope, deep: int
) -> bool | None:
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
        left = left.left
    if isinstance(left, ast.Constant) and isinstance(operator, (ast.Eq, ast.NotEq)):
        left, right = right, left
    if literal(right) is None and isinstance(right, ast.Constant):  # `writer is not None`
        if not isinstance(operator, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
            return None
        answer = _by_value(program, left, scope, deep) if isinstance(left, (ast.Name, ast.Attribute)) else None
        return answer if answer is None or isinstance(operator, (ast.IsNot, ast.NotEq)) else not answer
    if not is_rank(program, left, scope):
        return None
    if last_name(left).lower() in ("device", "dev", "cuda") and not isinstance(literal(right), int):
        return None
    value = literal(right)
    match operator:
        case ast.Eq():
            return None if value == -1 or isinstance(value, str) else True
        case ast.NotEq():
            return None if value == -1 or isinstance(value, str) else False
        case ast.In():
            return True
        case ast.NotIn():
            return False
        case ast.Gt():
            return False if value == 0 else None
        case ast.Lt() | ast.LtE():
            return True if value in (0, 1) else None
    return None


def _by_value(program: Program, test: ast.expr, scope: Scope, deep: int) -> bool | None:
    """A test by a name: of a comparison made earlier, or of an object that only some ranks have."""
    if not deep:
        return None
    for value in program.direct(test, scope):
        if isinstance(value.expr, (ast.Compare, ast.UnaryOp, ast.BoolOp)):
            answer = rank_test(program, value.expr, value.scope, deep - 1)
        elif isinstance(value.expr, ast.IfExp):
            empty = any(isinstance(part, ast.Constant) for part in (value.expr.body, value.expr.orelse))
            answer = rank_test(program, value.expr.test, value.scope, deep - 1) if empty else None
        elif isinstance(value.expr, ast.Call) and MAIN.search(last_name(value.expr)):
            answer = True
        elif isinstance(value.expr, ast.Call) and re.search(r"[Ww]riter|[Ll]ogger|wandb|init", last_name(value.expr)):
            answer = guard(program, value.expr, value.scope, 0)
        else:
            continue
        if answer is not None:
            return answer
    return None


def guard(program: Program, node: ast.AST, scope: Scope, deep: int = 2) -> bool | None:
    """True if only the main rank (or some) runs a line, False if only the others, None if all of them do."""
    for condition in program.conditions(node, scope):
        answer = rank_test(program, condition.test, scope)
        if answer is not None:
            return answer is condition.answer
    function: Scope | None = scope
    while function is not None and not function.is_function:
        function = function.outer
    if function is None:
        return None
    decorators = getattr(function.node, "decorator_list", [])
    if any(GUARDS.search(word) for decorator in decorators for word in words(decorator)):
        return True
    kind = function.owner if function.name != "__init__" else None
    made = program.sites.get(program.method(kind, "__init__") or kind, []) if kind else []
    for other in (each for module in program.modules for each in module.methods.get(function.name, []) if kind):
        derived = kind and kind.name in map(last_name, getattr(getattr(other.owner, "node", None), "bases", []))
        if derived and any(rank_test(program, test, other) is not None for test in other.tests):
            return True  # a class that is made of this one asks for the rank first
    for sites in (program.sites.get(function, []), made):  # who calls it; who makes the object whose method it is
        sites = [site for site in sites if site.scope in program.reached] if deep else []
        answers = [None if site.spawned else guard(program, site.call, site.scope, deep - 1) for site in sites]
        if answers and all(answer is not None for answer in answers):
            return answers[0]
    return None


def several_test(program: Program, test: ast.expr, scope: Scope) -> bool | None:
    """True if a test holds where there are several processes, False if where there is one, None if neither."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            answer = several_test(program, operand, scope)
            return None if answer is None else not answer
        case ast.BoolOp(values=values):
            answers = [several_test(program, value, scope) for value in values]
            return next((answer for answer in answers if answer is not None), None)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            value = literal(right)
            if isinstance(value, str) and SEVERAL.search(last_name(left)) and isinstance(operator, (ast.Eq, ast.NotEq)):
                return (value.lower() not in ("", "off", "none", "no", "false", "single")) is isinstance(
                    operator, ast.Eq
                )
            if not (any(SEVERAL.search(word) for word in words(left)) or RANK.search(last_name(left))):
                return None
            if value == -1 or (isinstance(right, ast.Constant) and value is None):
                return isinstance(operator, (ast.NotEq, ast.Gt, ast.IsNot))
            if value in (0, 1) and not RANK.search(last_name(left)):
                return isinstance(operator, (ast.Gt, ast.NotEq, ast.GtE))
            return True if value == 0 and isinstance(operator, ast.GtE) else None
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
            return False if last_name(kind) == "DataParallel" else None
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            return True if SEVERAL.search(key) else None
        case ast.Name() | ast.Attribute() | ast.Call():
            if SEVERAL.search(last_name(test)):
                return True
            for source in program.sources(test, scope):
                if isinstance(source.expr, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                    return several_test(program, source.expr, source.scope)
    return None


def optional(program: Program, node: ast.AST, scope: Scope, deep: int = 2) -> bool:
    """Whether a line runs only under a test of something else than whether processes are connected already."""
    for condition in program.conditions(node, scope):
        if not re.search(r"__name__|initialized|available", " ".join(words(condition.test))):
            return True
    sites = program.sites.get(scope, []) if deep else []
    return bool(sites) and all(optional(program, site.call, site.scope, deep - 1) for site in sites)


def alone(program: Program, node: ast.AST, scope: Scope, deep: int = 1) -> bool:
    """Whether a line runs only where there is one process."""
    for condition in program.conditions(node, scope):
        answer = several_test(program, condition.test, scope)
        if answer is not None and answer is not condition.answer:
            return True
    sites = program.sites.get(scope, []) if deep else []
    return bool(sites) and all(alone(program, site.call, site.scope, deep - 1) for site in sites)
