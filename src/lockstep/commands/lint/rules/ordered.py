"""Numbers and rows that stand in their first order: counted, sorted or read, and nothing shuffles them."""

import ast
import re

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk

DRAWS = re.compile(r"rand(int|perm|om)|permut|shuffle|sample$|choice|split$")
_KEEPS = ("drop", "dropna", "drop_duplicates", "reset_index", "copy", "query", "astype", "fillna", "rename", "assign")


def in_order(program: Program, node: ast.expr, depth: int = 0) -> bool:
    """range(k), list(range(k)), arange(k), a sorted list, or one of them cut at k, that nothing shuffles."""
    if isinstance(node, ast.Name | ast.Attribute):
        shuffled = [each for name in ("shuffle", "permutation", "sample") for each in program.named.get(name, [])]
        text = text_of(node)
        if any(text_of(arg) == text for each in shuffled for arg in each.args):
            return False
    made = origins(program, node)
    return bool(made) and depth < 8 and all(_in_order(program, each, depth + 1) for each in made)


def _in_order(program: Program, made: ast.AST, depth: int) -> bool:
    match made:
        case ast.Call(func=function, args=[_, *_], keywords=named) if last_name(function) == "sorted":
            return not any(re.search("hash|rand|md5|crc", text_of(each.value)) for each in named)
        case ast.Call(func=function, args=[inner]) if last_name(function) in ("list", "array"):
            return in_order(program, inner, depth)
        case ast.Call(func=ast.Attribute(value=inner, attr="tolist"), args=[]):
            return in_order(program, inner, depth)
        case ast.Call(func=function, args=[_]) if last_name(function) in ("range", "arange"):
            return True
        case ast.ListComp(elt=ast.Name(id=name), generators=[ast.comprehension(target=target, iter=source, ifs=[])]):
            return text_of(target) == name and in_order(program, source, depth)
        case ast.Subscript(value=value, slice=ast.Slice(lower=None, step=None)):
            return in_order(program, rows_of(value), depth)
    return of_rows(program, made, depth)


def rows_of(value: ast.expr) -> ast.expr:
    """The frame of `frame.iloc`; else the value itself."""
    return value.value if isinstance(value, ast.Attribute) and value.attr in ("iloc", "loc") else value


def of_rows(program: Program, made: ast.AST, depth: int = 0) -> bool:
    """Rows of a table in the order of its file: some may be left out, none has changed its place."""
    match made:
        case ast.Call(func=function) if qualified(program, function).startswith("pandas.read_"):
            return True
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _KEEPS:
            return in_order(program, inner, depth)
        case ast.Subscript(value=inner, slice=ast.Compare() | ast.BoolOp() | ast.BinOp() | ast.UnaryOp() | ast.Call()):
            return in_order(program, rows_of(inner), depth)
    return False


def consecutive(program: Program, node: ast.expr) -> bool:
    """Numbers in order of which some are left out: range(k), order[k:], folds and splits that nothing shuffles."""
    if isinstance(node, ast.Name | ast.Attribute) and _mixed(program, node):
        return False
    made = origins(program, node)
    return bool(made) and all(_consecutive(program, each) for each in made)


def _consecutive(program: Program, made: ast.AST) -> bool:
    match made:
        case ast.Call(func=function, args=[inner]) if last_name(function) in ("list", "array"):
            return consecutive(program, inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="tolist"), args=[]):
            return consecutive(program, inner)
        case ast.Call(func=function, args=[size]) if last_name(function) in ("range", "arange"):
            return not any(isinstance(each, ast.Call) and last_name(each.func) == "len" for each in [size])
        case ast.Call(func=function, args=[first, *_], keywords=named) if last_name(function) == "train_test_split":
            plain = [each for each in named if each.arg == "shuffle" and isinstance(each.value, ast.Constant)]
            return any(not each.value.value for each in plain) and in_order(program, first)  # type: ignore[attr-defined]
        case ast.Call(func=ast.Attribute(value=owner, attr="split"), args=[first, *_]):
            return text_of(owner) in ("np", "numpy", "torch") and in_order(program, first)
        case ast.Subscript(value=value, slice=ast.Slice(step=None)):
            return in_order(program, value) and not _mixed(program, value)
        case ast.Subscript(value=value, slice=ast.Slice()):
            return consecutive(program, value)
        case ast.For(iter=source):
            return _in_folds(program, source)
    return False


def _in_folds(program: Program, source: ast.expr) -> bool:
    """`for train, val in KFold(5).split(numbers)`: without shuffle=True its folds are pieces in order."""
    splits = [each for each in walk(source) if isinstance(each, ast.Call) and last_name(each.func) == "split"]
    made = [one for each in splits if isinstance(each.func, ast.Attribute) for one in origins(program, each.func.value)]
    plain = [each for each in made if isinstance(each, ast.Call) and last_name(each.func) == "KFold"]
    return bool(plain) and len(plain) == len(made) and not any("shuffle" in text_of(each) for each in plain)


def _mixed(program: Program, node: ast.expr) -> bool:
    """Whether a list is handed to something that may bring it into another order."""
    text = text_of(node)
    calls = [each for name, known in program.named.items() if DRAWS.search(name) for each in known]
    calls += [each for each in program.calls if isinstance(definition(program, each.func), Function)]
    return any(text_of(arg) == text for each in calls for arg in each.args if isinstance(arg, ast.Name | ast.Attribute))
