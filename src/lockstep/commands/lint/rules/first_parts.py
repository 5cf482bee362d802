"""The first part of a list where words or unused generators say that a random one was meant."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of, statement_of
from lockstep.commands.lint.calls import definition, lineage
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option, text_around
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import given, loaders, of_loader, samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.ordered import DRAWS, in_order, of_rows, rows_of
from lockstep.commands.lint.rules.per_process import called, comment
from lockstep.commands.lint.source import Function, Source, parameters
from lockstep.commands.lint.tree import text_of, walk

_RANDOM_PART = re.compile(
    r"random(ly)?\W.{0,20}(part|share|fraction|subset|portion|percent|sample|image|row)"
    r"|(part|share|fraction|subset|portion|percent|images?|samples?|pictures?)\b.{0,40}\b(at random|random(ly)?)\b"
)
_ALREADY = r"already|(is|are|was|were|been|pre-?|be) ?(in random order|shuffled|random(ly|i[sz]ed))"
_SHOWN = re.compile(r"\brandom(ly|i[sz]ed)?\W+(\w+\W+)?(crop|flip|augment|eras|resiz|rotat|transform|seed|init)\w*")
_GENERATORS = ("Generator", "default_rng", "RandomState", "Random", "manual_seed")


def draws_nothing(program: Program, node: ast.AST) -> bool:
    """Whether the function around a place makes a generator, or takes one or a seed for a subset, and never uses it."""
    function = function_of(program.owner[node], node)
    if function is not None and _orders(function) - _read_in(function):
        return True
    if function is None or any(isinstance(each, ast.Call) and _draws(each) for each in walk(function)):
        return False
    chooses = re.search(r"sub|sampl|split|part|pick|draw|take|choose|select|few|fraction", function.name.lower())
    taken = {each.arg for each in parameters(function) if chooses and each.arg in ("seed", "rng", "generator", "gen")}
    return bool((taken | _generators(function)) - _read_in(function))


def _read_in(function: Function) -> set[str]:
    return {each.id for each in walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _orders(function: Function) -> set[str]:
    """The names that a function binds to a random order."""
    found = set()
    for node in walk(function):
        value = node.value if isinstance(node, ast.Assign) else None
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
            value = value.func.value  # of torch.randperm(n).tolist()
        if isinstance(value, ast.Call) and last_name(value.func) in ("randperm", "permutation"):
            found |= {each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)}
    return found


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
    return bool(DRAWS.search(last_name(call.func)))


def told_random(program: Program, node: ast.AST) -> bool:
    """Whether an option that enters a value is explained as a random share."""

    def says(each: ast.AST) -> bool:
        if not isinstance(each, ast.Attribute | ast.Name | ast.Subscript):
            return False
        told = f"{option(program, called(each))[0]} {comment(program, each)}".lower()
        return bool(_RANDOM_PART.search(_SHOWN.sub("", told))) and not re.search(
            r"\b(not|never|without)\b.{0,12}random", told
        )

    return depends(program, node, says)


def by_words(program: Program) -> Iterator[Hit]:
    """order[:n] of a list in order, in a function, or beside a comment, that says random."""
    chosen = set[ast.AST]()
    for call in program.named.get("Subset", []):
        indices = given(program, call, "indices", 1)
        chosen.update([indices, *origins(program, indices)] if indices is not None else [])
    for source in program.sources:
        for node, value, upper in _firsts(source):
            if node not in chosen and in_order(program, value):
                plain = isinstance(value, ast.Call) or any(
                    of_rows(program, each, 0) for each in origins(program, value)
                )
                if _said(program, node) or (plain and told_random(program, upper)):
                    yield Hit(node)


def _firsts(source: Source) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """order[:n], frame.iloc[:n] and frame.head(n): the place, what is cut, and how much is kept."""
    for node in source.of(ast.Subscript, ast.Call):
        match node:
            case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=ast.expr() as upper, step=None)):
                yield node, rows_of(value), upper
            case ast.Call(func=ast.Attribute(value=value, attr="head"), args=[upper]):
                yield node, value, upper


def _said(program: Program, node: ast.expr) -> bool:
    source = program.owner[node]
    function = function_of(source, node)
    scope = list(walk(function)) if function is not None else source.nodes
    if any(isinstance(each, ast.Call) and _draws(each) for each in scope):
        return False
    words = text_around(program, statement_of(source, node), 2)
    words = " ".join(line.partition("#")[2] for line in words.splitlines())
    if function is not None:
        words += f" {function.name} {ast.get_docstring(function) or ''}"
    if re.search(_ALREADY, words.lower()) or re.search(
        r"\b(not?|never|without)\b.{0,12}random|debug|smoke|random(ly)?.(crop|flip|augm|init|seed)", words.lower()
    ):
        return False
    return bool(re.search(r"(\b|_)random", words.lower()))


def of_folders(program: Program) -> Iterator[Hit]:
    """The first pictures of a folder sorted by class: by a sampler over the first numbers, by `samples[:n]`."""
    for loader in loaders(program):
        of = of_loader(program, loader, "dataset")
        if of is None or not is_folder(program, of):
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
                    if text_of(listed) not in shuffled and is_folder(program, owner):
                        yield Hit(node)


def _is_cut(program: Program, node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, slice=ast.Slice(step=None)):
            return in_order(program, value)
    return False


def is_folder(program: Program, node: ast.AST) -> bool:
    """Whether a set is a folder of classes, which lists one class after the other."""
    made = [each for each in origins(program, node) if isinstance(each, ast.Call)]
    return any(_folders(program, each.func) for each in made)


def _folders(program: Program, name: ast.expr) -> bool:
    """ImageFolder, or a local class of its kind."""
    owner = definition(program, name)
    known = lineage(program, owner) if isinstance(owner, ast.ClassDef) else []
    return last_name(name) == "ImageFolder" or any(last_name(b) == "ImageFolder" for e in known for b in e.bases)
