"""The first part of a list where words or unused generators say that a random one was meant."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option, text_around
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import given, loaders, of_loader, samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.per_process import comment
from lockstep.commands.lint.source import Function, parameters
from lockstep.commands.lint.tree import text_of, walk

_DRAWS = re.compile(r"rand(int|perm|om)|permut|shuffle|sample$|choice|split$")
_RANDOM_PART = re.compile(
    r"random(ly)?\W.{0,20}(part|share|fraction|subset|portion|percent|sample)"
    r"|(part|share|fraction|subset|portion|percent|images?|samples?|pictures?)\b.{0,40}\b(at random|random(ly)?)\b"
)
_GENERATORS = ("Generator", "default_rng", "RandomState", "Random", "manual_seed")


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
        case ast.Subscript(value=value, slice=ast.Slice(lower=None, step=None)):
            return in_order(program, value, depth)
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
    calls = [each for name, known in program.named.items() if _DRAWS.search(name) for each in known]
    calls += [each for each in program.calls if isinstance(definition(program, each.func), Function)]
    return any(text_of(arg) == text for each in calls for arg in each.args if isinstance(arg, ast.Name | ast.Attribute))


def draws_nothing(program: Program, node: ast.AST) -> bool:
    """Whether the function around a place makes a generator, or takes one or a seed for a subset, and never uses it."""
    function = function_of(program.owner[node], node)
    if function is not None and _orders(function) - _read_in(function):
        return True
    if function is None or any(isinstance(each, ast.Call) and _draws(each) for each in walk(function)):
        return False
    chooses = re.search(r"sub|sampl|split|part|pick|draw", function.name.lower())
    taken = {each.arg for each in parameters(function) if chooses and each.arg in ("seed", "rng", "generator", "gen")}
    return bool((taken | _generators(function)) - _read_in(function))


def _read_in(function: Function) -> set[str]:
    return {each.id for each in walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _orders(function: Function) -> set[str]:
    """The names that a function binds to a random order."""
    made = [each for each in walk(function) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    drawn = [each for each in made if last_name(each.value.func) in ("randperm", "permutation")]  # type: ignore[attr-defined]
    return {target.id for each in drawn for target in each.targets if isinstance(target, ast.Name)}


def _generators(function: Function) -> set[str]:
    """The names that a function binds to a random generator."""
    made = [each for each in walk(function) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    return {
        target.id
        for each in made
        for target in each.targets
        if isinstance(target, ast.Name) and isinstance(each.value, ast.Call)
        if last_name(each.value.func) in _GENERATORS
    }


def _draws(call: ast.Call) -> bool:
    return bool(_DRAWS.search(last_name(call.func)))


def told_random(program: Program, node: ast.AST) -> bool:
    """Whether an option that enters a value is explained as a random share."""

    def says(each: ast.AST) -> bool:
        if not isinstance(each, ast.Attribute | ast.Name):
            return False
        told = f"{option(program, last_name(each))[0]} {comment(program, each)}".lower()
        return bool(_RANDOM_PART.search(told)) and not re.search(r"\b(not|never|without)\b.{0,12}random", told)

    return depends(program, node, says)


def by_words(program: Program) -> Iterator[Hit]:
    """order[:n] of a list in order, in a function, or beside a comment, that says random."""
    chosen = set[ast.AST]()
    for call in program.named.get("Subset", []):
        indices = given(program, call, "indices", 1)
        chosen.update([indices, *origins(program, indices)] if indices is not None else [])
    for source in program.sources:
        for node in source.of(ast.Subscript):
            match node:
                case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=ast.expr(), step=None)):
                    told = in_order(program, value) and (_said(program, node) or _told_so(program, node, value))
                    if node not in chosen and told:
                        yield Hit(node)


def _told_so(program: Program, node: ast.Subscript, value: ast.expr) -> bool:
    """Whether a sorted list is cut at a number that is explained as one of samples drawn at random."""
    upper = node.slice.upper if isinstance(node.slice, ast.Slice) else None
    return upper is not None and isinstance(value, ast.Call) and told_random(program, upper)


def _said(program: Program, node: ast.Subscript) -> bool:
    source = program.owner[node]
    function = function_of(source, node)
    scope = list(walk(function)) if function is not None else source.nodes
    if any(isinstance(each, ast.Call) and _draws(each) for each in scope):
        return False
    words = text_around(program, statement_of(source, node), 2)
    words = " ".join(line.partition("#")[2] for line in words.splitlines())
    if function is not None:
        words += f" {function.name} {ast.get_docstring(function) or ''}"
    if re.search(
        r"\b(not?|never|without)\b.{0,12}random|debug|smoke|random(ly)?.(crop|flip|augm|init|seed)", words.lower()
    ):
        return False
    return bool(re.search(r"(\b|_)random", words.lower()))


def of_folders(program: Program) -> Iterator[Hit]:
    """The first pictures of a folder sorted by class: by a sampler over the first numbers, by `samples[:n]`."""
    for loader in loaders(program):
        of = of_loader(program, loader, "dataset")
        if of is None or not _is_folder(program, of):
            continue
        for sampler in samplers(program, loader):
            if last_name(sampler.func) == "SubsetRandomSampler" and sampler.args:
                made = origins(program, sampler.args[0])
                if made and all(_is_cut(program, each) for each in made):
                    yield Hit(made[0])
    shuffled = {text_of(arg) for each in program.named.get("shuffle", []) for arg in each.args}
    for source in program.sources:
        for node in source.of(ast.Subscript):
            match node:
                case ast.Subscript(
                    value=ast.Attribute(value=owner, attr="samples" | "imgs") as listed,
                    slice=ast.Slice(lower=None, upper=ast.expr(), step=None),
                ):
                    if text_of(listed) not in shuffled and _is_folder(program, owner):
                        yield Hit(node)


def _is_cut(program: Program, node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, slice=ast.Slice(step=None)):
            return in_order(program, value)
    return False


def _is_folder(program: Program, node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) and last_name(each.func) == "ImageFolder" for each in origins(program, node))
