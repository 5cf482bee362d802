"""Rules about which set a loader reads, and which part of it."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.flow import text_around
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.ranks import is_rank
from lockstep.commands.lint.roles import constant, datasets, given, loaders, of_loader, samplers, training_loaders
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.first_parts import (
    by_words,
    draws_nothing,
    is_folder,
    of_folders,
    told_random,
)
from lockstep.commands.lint.rules.ordered import consecutive, in_order
from lockstep.commands.lint.rules.overlap import apart, on_training_samples
from lockstep.commands.lint.rules.sets import in_hooks, misnamed
from lockstep.commands.lint.several import library
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS106",
    "test-over-training-set",
    "the test loader reads the training set",
    result="the printed accuracy is that on samples that were trained on: it says nothing about new ones",
    why="the loader that evaluation runs over was given the training set",
    mend="test_loader = DataLoader(test_set, batch_size=256)",
)
def test_over_training_set(program: Program) -> Iterator[Hit]:
    """A loader called test or val, whose data set is the training loader's, or was made with train=True."""
    trained = training_loaders(program)
    of_training = {
        made for loader in trained if (node := of_loader(program, loader, "dataset")) for made in origins(program, node)
    }
    known = set(datasets(program))
    for loader in loaders(program):
        node = of_loader(program, loader, "dataset")
        name = _assigned(program, loader)
        if (
            loader in trained
            or node is None
            or not re.search(r"(^|_)(test|val|valid|validation)", name)
            or "train" in name
        ):
            continue
        chosen = [
            each
            for each in samplers(program, loader)
            if last_name(each.func) not in ("DistributedSampler", "SequentialSampler")
        ]
        sets = _uncut([each for each in origins(program, node) if isinstance(each, ast.Call)], program)
        own = [each for each in sets if each in known or isinstance(definition(program, each.func), ast.ClassDef)]
        same = bool(own) and set(own) <= of_training and not _made_apart(program, node, trained)
        same = same and not apart(program, loader)
        wrong = bool(own) and all(
            each in known and constant(program, given(program, each, "train", 1)) is True for each in own
        )
        named = any(_same_name(program, node, of_loader(program, each, "dataset")) for each in trained)
        shared = of_training & set(sets)
        if not chosen and ((len(own) == len(sets) and (same or wrong)) or named):
            yield Hit(own[0] if wrong and not shared and not named else loader)
    yield from on_training_samples(program)
    yield from _of_another_length(program)
    yield from misnamed(program)
    yield from in_hooks(program)


def _uncut(sets: list[ast.Call], program: Program) -> list[ast.Call]:
    """Data sets, with a rank's share of one standing for the whole of it."""
    found = []
    for each in sets:
        share = last_name(each.func) == "Subset" and len(each.args) > 1 and any(map(is_rank, walk(each.args[1])))
        inner = origins(program, each.args[0]) if share else [each]
        found += [one for one in inner if isinstance(one, ast.Call)]
    return found


def _of_another_length(program: Program) -> Iterator[Hit]:
    """Subset(train, range(rank, len(val), world)): numbers of one set, pictures of another."""
    for call in program.named.get("Subset", []):
        of, chosen = given(program, call, "dataset", 0), given(program, call, "indices", 1)
        made = [chosen, *origins(program, chosen)] if chosen is not None and isinstance(of, ast.Name) else []
        own = f"len({of.id})" if isinstance(of, ast.Name) else ""
        if own and any(own in text_of(each) for each in made):
            continue  # a part of it as large as another set
        for node in [part for each in made for part in walk(each)]:
            match node:
                case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=other)]) if isinstance(of, ast.Name):
                    evaluated = re.search(r"test|val", other.lower()) and "train" in of.id.lower()
                    if evaluated and other != of.id:
                        yield Hit(call, f"{of.id} by the numbers of {other}")


def _made_apart(program: Program, node: ast.expr, trained: dict[ast.Call, list[Loop]]) -> bool:
    """Whether the set comes from a local function that was given other arguments than for the training set."""
    others = [of_loader(program, each, "dataset") for each in trained]
    mine = _factories(program, node, 0)
    return bool(mine) and not any(mine & _factories(program, each, 0) for each in others if each is not None)


def _factories(program: Program, node: ast.AST, depth: int) -> set[str]:
    """The calls of local functions that a name's value is returned by, as texts."""
    if isinstance(node, ast.Call):
        return {ast.dump(node)} if isinstance(definition(program, node.func), Function) else set()
    found: set[str] = set()
    for binding in bindings(program, node, node.id) if isinstance(node, ast.Name) and depth < 5 else []:
        assert isinstance(node, ast.Name)
        if binding.kind == "param":
            function = program.owner[binding.node].scopes[binding.node]
            known = sites(program, function) if isinstance(function, Function) else []
            values: list[ast.AST | None] = [argument(site, node.id) for site in known]
        else:
            whole = binding.value
            parts = whole.elts if isinstance(whole, ast.Tuple) and binding.path else [whole]
            values = [(at(parts, binding.path[0]) if len(parts) > 1 else None) or whole]
        for value in values:
            found |= _factories(program, value, depth + 1) if value is not None else set()
    return found


def _same_name(program: Program, one: ast.expr, other: ast.expr | None) -> bool:
    """Whether two loaders of a function are given a set by the same name, bound once."""
    if not (isinstance(one, ast.Name) and isinstance(other, ast.Name) and one.id == other.id):
        return False
    found = bindings(program, one, one.id)
    return len(found) == 1 and found[0].kind == "value" and found == bindings(program, other, other.id)


def _assigned(program: Program, node: ast.AST) -> str:
    """The names that the statement of a node assigns to."""
    statement = statement_of(program.owner[node], node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return " ".join(last_name(each).lower() for each in targets)


@rule(
    "LS107",
    "random-subset-is-the-first",
    "the random subset is the first part of the set",
    result="one part of the data is never seen; in a folder sorted by class, whole classes",
    why="the numbers run from 0 to the subset's size, and nothing shuffles them",
    mend="generator = torch.Generator().manual_seed(seed)\n"
    "Subset(dataset, torch.randperm(len(dataset), generator=generator)[:size].tolist())",
)
def random_subset_is_the_first(program: Program) -> Iterator[Hit]:
    """Subset(set, range(k)) that is called random, or of a folder of classes."""
    yield from by_words(program)
    yield from of_folders(program)
    told = set[ast.AST]()
    for call, of, chosen in _subsets(program):
        scope = program.owner[call].scopes[call]
        if is_folder(program, of) and consecutive(program, chosen):
            made = next(iter(origins(program, chosen)))
            if scope not in told and not _on_purpose(_words(program, call, chosen)):  # once for both parts of a split
                yield Hit(made if isinstance(made, ast.Subscript) else call)
            told.add(scope)
        elif in_order(program, chosen) and _meant_random(program, call, chosen):
            yield Hit(call)


def _subsets(program: Program) -> Iterator[tuple[ast.Call, ast.expr, ast.expr]]:
    """Subset(set, numbers), and `set.select(numbers)` of a set that wasn't shuffled: the call, the set, the numbers."""
    for call in program.named.get("Subset", []):
        of, chosen = given(program, call, "dataset", 0), given(program, call, "indices", 1)
        if of is not None and chosen is not None:
            yield call, of, chosen
    for call in program.named.get("select", []) if library(program, "datasets") else ():
        match call:
            case ast.Call(func=ast.Attribute(value=of), args=[chosen]) if definition(program, call.func) is None:
                if not any("shuffle" in text_of(each) for each in [of, *origins(program, of)]):
                    yield call, of, chosen


def _on_purpose(words: str) -> bool:
    return bool(re.search(r"not (a )?random|debug|smoke", words))


def _words(program: Program, call: ast.Call, chosen: ast.expr) -> str:
    """What stands around a subset and its numbers: code, comments, the function's name and what it says of itself."""
    source = program.owner[call]
    function = function_of(source, call)
    words = text_around(program, statement_of(source, call), 3) + (function.name if function else "")
    words += (ast.get_docstring(function) or "") if function else ""
    return words + " ".join(text_around(program, each, 2) for each in origins(program, chosen))


def _meant_random(program: Program, call: ast.Call, chosen: ast.expr) -> bool:
    """Whether words around a subset, or a generator that nothing uses, say that it was to be drawn at random."""
    words = _words(program, call, chosen)
    if _on_purpose(words):
        return False
    said = re.search(
        r"random|shuffl|\brand\b|随机", re.sub(r"random_split|RandomSampler|random_state|shuffle=\w+", "", words)
    )
    return bool(said) or draws_nothing(program, call) or told_random(program, chosen)
