"""The first part of a list where words or unused generators say that a random one was meant."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option, text_around
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import given, loaders, of_loader, samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.source import Function, function_of, parameters, statement_of

_DRAWS = re.compile(r"rand(int|perm|om)|permut|shuffle|sample$|choice|split$")
_GENERATORS = ("Generator", "default_rng", "RandomState", "Random", "manual_seed")


def in_order(program: Program, node: ast.expr) -> bool:
    """range(k), list(range(k)), arange(k), a sorted list, or one of them cut at k, that nothing shuffles."""
    if isinstance(node, ast.Name | ast.Attribute):
        shuffled = [each for name in ("shuffle", "permutation", "sample") for each in program.named.get(name, [])]
        text = ast.unparse(node)
        if any(ast.unparse(arg) == text for each in shuffled for arg in each.args):
            return False
    made = origins(program, node)
    return bool(made) and all(_in_order(program, each) for each in made)


def _in_order(program: Program, made: ast.AST) -> bool:
    match made:
        case ast.Call(func=function, args=[_, *_]) if last_name(function) == "sorted":
            return True
        case ast.Call(func=function, args=[inner]) if last_name(function) in ("list", "array"):
            return in_order(program, inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="tolist"), args=[]):
            return in_order(program, inner)
        case ast.Call(func=function, args=[_]) if last_name(function) in ("range", "arange"):
            return True
        case ast.Subscript(value=value, slice=ast.Slice(lower=None, step=None)):
            return in_order(program, value)
    return False


def draws_nothing(program: Program, node: ast.AST) -> bool:
    """Whether the function around a place makes a generator, or takes one or a seed for a subset, and never uses it."""
    function = function_of(program.owner[node], node)
    if function is None or any(isinstance(each, ast.Call) and _draws(each) for each in ast.walk(function)):
        return False
    read = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    chooses = re.search(r"sub|sampl|split|part|pick|draw", function.name.lower())
    taken = {each.arg for each in parameters(function) if chooses and each.arg in ("seed", "rng", "generator", "gen")}
    return bool((taken | _generators(function)) - read)


def _generators(function: Function) -> set[str]:
    """The names that a function binds to a random generator."""
    made = [each for each in ast.walk(function) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
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
        told = option(program, last_name(each))[0].lower() if isinstance(each, ast.Attribute | ast.Name) else ""
        return bool(re.search(r"random(ly)?\W.{0,20}(part|share|fraction|subset|portion|percent)", told))

    return depends(program, node, says)


def by_words(program: Program) -> Iterator[Hit]:
    """order[:n] of a list in order, in a function, or beside a comment, that says random."""
    chosen = set[ast.AST]()
    for call in program.named.get("Subset", []):
        indices = given(program, call, "indices", 1)
        chosen.update([indices, *origins(program, indices)] if indices is not None else [])
    for source in program.sources:
        for node in source.nodes:
            match node:
                case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=ast.expr(), step=None)):
                    if node not in chosen and in_order(program, value) and _said(program, node):
                        yield Hit(node)


def _said(program: Program, node: ast.Subscript) -> bool:
    source = program.owner[node]
    function = function_of(source, node)
    scope = list(ast.walk(function)) if function is not None else source.nodes
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
    shuffled = {ast.unparse(arg) for each in program.named.get("shuffle", []) for arg in each.args}
    for source in program.sources:
        for node in source.nodes:
            match node:
                case ast.Subscript(
                    value=ast.Attribute(value=owner, attr="samples" | "imgs") as listed,
                    slice=ast.Slice(lower=None, upper=ast.expr(), step=None),
                ):
                    if ast.unparse(listed) not in shuffled and _is_folder(program, owner):
                        yield Hit(node)


def _is_cut(program: Program, node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, slice=ast.Slice(step=None)):
            return in_order(program, value)
    return False


def _is_folder(program: Program, node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) and last_name(each.func) == "ImageFolder" for each in origins(program, node))
