"""Evaluation on the samples that were trained on: the sets behind the loops' loaders, compared."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.around import function_of, statement_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.instances import resolve
from lockstep.commands.lint.keys import Key
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import LOADERS, collects, evaluation_loops, step_loops
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import given, of_loader
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.samples import loaders_behind, set_of
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import text_of, walk
from lockstep.commands.lint.ways import Made, ways, within

_TEST = re.compile(r"(^|_)(te|test\w*|va|val|valid\w*|dev|eval\w*|held\w*|holdout)(_|$)")
_TRAIN = re.compile(r"train|(^|_)tr(_|$)|fit")


@dataclass(frozen=True, eq=False)
class Read:
    """A loader that a loop runs over, in one way of calls."""

    loop: ast.AST
    loader: Made
    told: Key | None
    hooked: bool = False  # handed to the framework as the one or the other

    @property
    def trains(self) -> bool:
        """Whether a name on the way says that the samples are those of training."""
        names = [last_name(each).lower() for each in self.loader.trail if isinstance(each, ast.Name | ast.Attribute)]
        entries = [text_of(each.slice) for each in self.loader.trail if isinstance(each, ast.Subscript)]
        return any(map(_TRAIN.search, [*names, *entries]))


@remembered
def reads(program: Program, loop: Loop) -> list[Read]:
    """The loaders that a loop runs over, one for each way of calls, with the set that each reads."""
    found = []
    for way in ways(program, loop):
        place = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else None
        for made in loaders_behind(program, within(way, place), 0) if place is not None else ():
            found.append(Read(loop, made, set_of(program, made)))
    return found


def on_training_samples(program: Program) -> Iterator[Hit]:
    """An evaluation, by its names one of a test set, over the samples that are trained on."""
    trained = [each for each in trained_on(program) if each.told is not None]
    keys = {each.told for each in trained}
    whole = {told[1] for told in keys if told is not None and told[0] == "part"}
    judged = [each for each in evaluated_on(program) if trained and each.told is not None]
    same = [each for each in judged if each.told in keys or each.told in whole or _part_of(each.told, keys)]
    idle = len(same) == len(judged) and bool(_idle(program)) if same else False
    others = {each.loop for each in judged if each not in same}
    for read in same:
        if idle or read.hooked or _as_test(program, read, alone=read.loop not in others):
            yield Hit(_place(program, read, [each for each in trained if each.told == read.told]))


def _part_of(told: Key | None, keys: set[Key | None]) -> bool:
    """Whether the samples are a part of a set that training reads as a whole, and never without some of it."""
    if told is None or told[0] != "part" or told[1] not in keys:
        return False
    return not any(each is not None and each[0] == "part" and each[1] == told[1] for each in keys)


def trained_on(program: Program) -> Iterator[Read]:
    """What the training loops, Lightning's hooks and Ignite's trainers read."""
    for loop in step_loops(program):
        yield from reads(program, loop)
    yield from of_hooks(program, ("train_dataloader",), 1, ("train_dataloaders",))
    yield from of_engines(program, trains=True)


def evaluated_on(program: Program) -> Iterator[Read]:
    """What the evaluation loops, Lightning's hooks and Ignite's evaluators read."""
    for loop in evaluation_loops(program):
        if not collects(program, loop):
            yield from reads(program, loop)
    yield from of_hooks(program, ("val_dataloader", "test_dataloader"), 2, ("val_dataloaders",))
    yield from of_engines(program, trains=False)


def of_hooks(program: Program, names: tuple[str, ...], position: int, keywords: tuple[str, ...]) -> Iterator[Read]:
    """The loaders that Lightning's hooks return, and those that `fit` is given."""
    if not library(program, "lightning", "pytorch_lightning"):
        return
    found: list[tuple[ast.expr | None, ast.expr | None]]
    found = [(each, each) for name in names for one in program.methods.get(name, []) for each in returns(program, one)]
    fits = [
        each for each in program.named.get("fit", []) if callee(program, each) is None and _by_trainer(program, each)
    ]
    found += [(call, given(program, call, keywords[0], position)) for call in fits]
    for name in ("test", "validate") if position == 2 else ():
        runs = [each for each in program.named.get(name, []) if _by_trainer(program, each)]
        found += [(call, given(program, call, "dataloaders", 1)) for call in runs]
    for node, value in found:
        for way in ways(program, node) if node is not None and value is not None else ():
            for made in loaders_behind(program, within(way, value), 0) if value is not None else ():
                yield Read(way.node, made, set_of(program, made), hooked=True)


def _by_trainer(program: Program, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and bool(made_by(program, call.func.value, "Trainer", "LightningCLI"))


def of_engines(program: Program, *, trains: bool) -> Iterator[Read]:
    """The loaders that Ignite's engines run over."""
    if not library(program, "ignite"):
        return
    for call in program.named.get("run", []):
        engine = origins(program, call.func.value) if isinstance(call.func, ast.Attribute) and call.args else []
        made = {last_name(each.func) for each in engine if isinstance(each, ast.Call)}
        if made == {"create_supervised_trainer" if trains else "create_supervised_evaluator"}:
            for way in ways(program, call):
                for loader in loaders_behind(program, within(way, call.args[0]), 0):
                    yield Read(call, loader, set_of(program, loader))


def _idle(program: Program) -> list[str]:
    """The names of loaders for evaluation that are made, and that nothing reads."""
    found = []
    for source in program.sources:
        read = {each.id for each in source.of(ast.Name) if isinstance(each.ctx, ast.Load)}
        for names in source.names.values():
            for name, known in names.items():
                if name in read or not _TEST.search(name.lower()) or _TRAIN.search(name.lower()):
                    continue
                values = [Made(each.value) for each in known if each.kind == "value" and each.value and not each.path]
                found += [name for each in values if list(loaders_behind(program, each, 0))]
    return found


def _as_test(program: Program, read: Read, alone: bool) -> bool:
    """Whether a loop's loader goes by a name for evaluation, and by none for training, up to where it is made.

    `alone`: the loop judges no other set; where it does, its function's name says nothing of this one.
    """
    names = []
    for node in read.loader.trail:
        if isinstance(node, ast.Name | ast.Attribute):
            names.append(last_name(node))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names.append(str(node.slice.value))
        elif isinstance(node, ast.Call) and node in program.owner and callee(program, node) is not None:
            name = last_name(node.func).lower()
            names += [name] if not _TRAIN.search(name) else []
    function = function_of(program.owner[read.loop], read.loop)
    names += [function.name] if function is not None and alone else []
    told = [each.lower() for each in names]
    told = told if any(map(_TEST.search, told)) else [*told, *_words(program, read)]
    return any(map(_TEST.search, told)) and not any(map(_TRAIN.search, told))


def _words(program: Program, read: Read) -> Iterator[str]:
    """What is printed beside an evaluation: `print(f"test {score(loader):.4f}")`."""
    for node in read.loader.trail:
        if isinstance(node, ast.Name) and node in program.owner:
            outer = statement_of(program.owner[node], node)
            told = outer.value if isinstance(outer, ast.Expr) else None
            texts = [each.value for each in walk(told) if isinstance(each, ast.Constant)] if told is not None else []
            yield from (word for text in texts if isinstance(text, str) for word in re.findall(r"[a-z]+", text.lower()))


def _place(program: Program, read: Read, trained: list[Read]) -> ast.AST:
    """Where the way to the training set turns into one that a training loop takes."""
    mine = _way(program, read)
    last = len(mine)
    for other in trained:
        theirs, same = _way(program, other), 0
        while same < min(len(mine), len(theirs)) and mine[-1 - same] is theirs[-1 - same]:
            same += 1
        last = min(last, len(mine) - same)
    before = [each for each in mine[:last] if each in program.owner]
    return before[-1] if before else read.loop


def _way(program: Program, read: Read) -> list[ast.AST]:
    """From a loop to the call that makes the set it reads."""
    call, one = read.loader.node, read.loader
    while isinstance(call, ast.Call) and (node := _given_set(program, call)) is not None and len(one.trail) < 30:
        found = resolve(program, within(one, node))
        one, call = found[0], found[0].node
    return [*one.trail, one.node]


def _given_set(program: Program, call: ast.Call) -> ast.expr | None:
    if last_name(call.func) in LOADERS:
        return of_loader(program, call, "dataset")
    return call.args[0] if last_name(call.func) == "Subset" and call.args else None


def apart(program: Program, loader: ast.Call) -> bool:
    """Whether a loader is known to read other samples than any training loop."""
    trained = [each.told for each in trained_on(program)]
    mine = [each.told for each in evaluated_on(program) if each.loader.node is loader]
    mine = mine or [set_of(program, Made(loader))]
    return bool(trained) and None not in trained and None not in mine and not set(mine) & set(trained)
