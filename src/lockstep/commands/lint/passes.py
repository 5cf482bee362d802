"""A program gone through as it runs, as far as models' modes go: who says train() and eval(), who is called after it.

Loops are gone through twice, conditions that can't be told both ways, calls of local functions with their arguments.
"""

import ast
from dataclasses import replace

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.contexts import (
    UNKNOWN,
    Mode,
    Pass,
    Run,
    Use,
    around_yield,
    calls_of,
    comprehension,
    few,
    joined,
    matters,
    of_module,
    optimized,
    quiet,
    says_mode,
    silences,
)
from lockstep.commands.lint.frames import Frame, entered, held, key, truth
from lockstep.commands.lint.places import backwards
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.sites import Site, sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, yields

_MOST = 4000  # statements gone through; past it, nothing is said


class _TooLong(Exception):
    pass


@remembered
def run(program: Program) -> Run | None:
    """Go through a program from its top; None where there is too much of it, or no training."""
    if not backwards(program):
        return None
    started: dict[ast.Call, list[Site]] = {}
    for source in program.sources:
        for node in source.functions:
            for site in sites(program, node):
                started.setdefault(site.call, []).append(site)
    found = Run(program, set(backwards(program)), started)
    try:
        _block(found, program.root.tree.body, Frame())
        for function in program.root.functions:
            if not sites(program, function) and matters(program, function):
                found.modes = {}
                _body(found, function, Frame(function, depth=1))
    except _TooLong:
        return None
    return found


def _block(run: Run, block: list[ast.stmt], frame: Frame) -> bool:
    """Go through statements; whether they end the function, or the loop's pass."""
    for node in block:
        run.count += 1
        if run.count > _MOST:
            raise _TooLong
        match node:
            case ast.If():
                if _choice(run, node, frame):
                    return True
            case ast.For() | ast.AsyncFor() | ast.While():
                _loop(run, node, frame)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                if _with(run, items, body, frame):
                    return True
            case ast.Try(body=body, orelse=other, finalbody=final):
                ended = _block(run, [*body, *other], frame)
                if _block(run, final, frame) or ended:
                    return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _:
                _statement(run, node, frame)
                if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
                    return True
    return False


def _choice(run: Run, node: ast.If, frame: Frame) -> bool:
    _calls(run, node.test, frame)
    known = truth(run.program, node.test, frame)
    if known is not None:
        return _block(run, node.body if known else node.orelse, frame)
    before, under, text = dict(run.modes), run.under, text_of(node.test)
    run.under = (*under, text)
    ends = [_block(run, node.body, frame)]
    first, run.modes = run.modes, dict(before)
    ends.append(_block(run, node.orelse, frame))
    run.under = under
    if ends == [True, False]:
        return False
    if ends[1] and not ends[0]:
        run.modes = first
        return False
    run.modes = joined(first, run.modes, text)
    return all(ends)


def _loop(run: Run, node: Loop, frame: Frame) -> None:
    program = run.program
    _calls(run, node.test if isinstance(node, ast.While) else node.iter, frame)
    values = few(program, node, frame)
    for number in range(len(values) or 2):
        if values and isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            frame.given[node.target.id] = (values[number], frame)
        before = dict(run.modes)
        run.within.append(Pass(node, frame))
        _block(run, node.body, frame)
        _over(run)
        if not values and run.modes == before:
            break
    if values and isinstance(node, ast.For) and isinstance(node.target, ast.Name):
        del frame.given[node.target.id]
    _block(run, node.orelse, frame)


def _over(run: Run) -> None:
    """End a pass: what it evaluated has been used so."""
    done = run.within.pop()
    run.passes.append(done)
    if not done.backward and done.uses:
        for use in done.uses:
            now = run.modes.get(use.key, frozenset())
            run.modes[use.key] = frozenset(replace(mode, used=True) if mode in use.modes else mode for mode in now)


def _with(run: Run, items: list[ast.withitem], body: list[ast.stmt], frame: Frame) -> bool:
    before_it, after = run.quiet, []
    for item in items:
        node = item.context_expr
        function = callee(run.program, node) if isinstance(node, ast.Call) else None
        if function is not None and isinstance(node, ast.Call) and yields(function):
            inner = entered(run.started[node][0], frame)
            run.quiet += quiet(function)
            before, behind = around_yield(function.body)
            _block(run, before, inner)
            after.append((behind, inner))
        else:
            _calls(run, node, frame)
            run.quiet += silences(run.program, node, frame)
    ended = _block(run, body, frame)
    for behind, inner in reversed(after):
        _block(run, behind, inner)
    run.quiet = before_it
    return ended


def _statement(run: Run, node: ast.stmt, frame: Frame) -> None:
    over = comprehension(run.program, node)
    if over is not None:
        run.within.append(Pass(over, frame))
    _calls(run, node, frame)
    if over is not None:
        _over(run)


def _calls(run: Run, node: ast.AST, frame: Frame) -> None:
    for each in calls_of(run.program, node):
        _call(run, each, frame)


def _call(run: Run, node: ast.Call, frame: Frame) -> None:
    program, name = run.program, last_name(node.func)
    if node in run.backward:
        for each in run.within[-1:]:
            each.backward = True
    for model in optimized(program, node):
        if (found := key(program, model, frame)) is not None:
            run.trained.add(found)
    if name in ("train", "eval") and isinstance(node.func, ast.Attribute) and not qualified(program, node.func):
        function = callee(program, node)
        if function is None or of_module(function):
            _say(run, node, node.func.value, frame)
            return
    known = [each for each in run.started.get(node, []) if matters(program, each.function)]
    for site in known:
        if site.function not in run.active and frame.depth < 12:
            _body(run, site.function, entered(site, frame))
    if not known and isinstance(node.func, ast.Name | ast.Attribute) and not _dispatched(run, node, frame):
        found = key(program, node.func, frame) if node.args and run.modes and run.within else None
        if found is not None and found in run.modes:
            run.within[-1].uses.append(Use(found, node, run.modes[found], not run.quiet))


def _dispatched(run: Run, node: ast.Call, frame: Frame) -> bool:
    """A function that was handed in is run; where one of several methods may be meant, modes are forgotten."""
    program = run.program
    if isinstance(node.func, ast.Name) and node.func.id in frame.given:
        value, _ = held(program, node.func, frame)
        function = definition(program, value)
        if isinstance(function, Function) and function not in run.active and frame.depth < 12:
            _body(run, function, entered(Site(node, function, list(node.args), 0), frame))
            return True
    if isinstance(node.func, ast.Attribute) and not run.started.get(node) and not qualified(program, node.func):
        several = any(says_mode(program, each) for each in program.methods.get(node.func.attr, []))
        run.modes = {} if several else run.modes
        return several
    return False


def _say(run: Run, node: ast.Call, model: ast.expr, frame: Frame) -> None:
    """model.train(), model.eval(), model.train(flag)."""
    program = run.program
    found = key(program, model, frame)
    if found is None:
        run.modes = {}  # it may be any of them
        return
    training: bool | None = last_name(node.func) == "train"
    given = [*node.args, *(each.value for each in node.keywords)]
    if training and given:
        training = truth(program, given[0], frame)
    for other in [each for each in run.modes if each & found]:
        run.modes[other] = frozenset({UNKNOWN})
    mode = UNKNOWN if training is None else Mode(training, node, under=frozenset(run.under))
    run.modes[found] = frozenset({mode})


def _body(run: Run, function: Function, frame: Frame) -> None:
    before_it, active = run.quiet, len(run.active)
    run.quiet += any(map(quiet, function.decorator_list))
    run.active.append(function)
    _block(run, function.body, frame)
    del run.active[active:]
    run.quiet = before_it
