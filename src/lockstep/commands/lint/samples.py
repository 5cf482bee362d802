"""Which samples a loader reads, whatever is done to their pictures."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.instances import resolve
from lockstep.commands.lint.keys import Key, call_key, key
from lockstep.commands.lint.places import LOADERS
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import of_loader
from lockstep.commands.lint.source import Source
from lockstep.commands.lint.tree import text_of, walk
from lockstep.commands.lint.ways import Made, within
from lockstep.commands.lint.whole import DRESS, dresses, of_class, ranked

_DATASETS = re.compile(r"(^|\.)datasets\.|^timm\.data\.(\w+\.)?create_dataset$")
_ALL: Key = ("all",)


def loaders_behind(program: Program, one: Made, depth: int) -> Iterator[Made]:
    """The loaders that a value may be, through enumerate, tqdm and the like."""
    for made in resolve(program, one):
        call = made.node
        if not isinstance(call, ast.Call) or depth > 3:
            continue
        if last_name(call.func) in LOADERS and definition(program, call.func) is None:
            yield made
        elif definition(program, call.func) is None and call.args:
            yield from loaders_behind(program, within(made, call.args[0]), depth + 1)


def set_of(program: Program, loader: Made) -> Key | None:
    """The samples that a loader reads, told so that equal sets have equal keys; None where they can't be told."""
    call = loader.node
    assert isinstance(call, ast.Call)
    node = of_loader(program, call, "dataset")
    if node is None:
        return None
    base = samples_of(program, within(loader, node))
    sampler = of_loader(program, call, "sampler")
    if base is None or of_loader(program, call, "batch_sampler") is not None:
        return None
    for made in resolve(program, within(loader, sampler)) if sampler is not None else ():
        name = last_name(made.node.func) if isinstance(made.node, ast.Call) else ""
        if isinstance(made.node, ast.Call) and name == "SubsetRandomSampler" and made.node.args:
            chosen = key(program, within(made, made.node.args[0]))
            return None if chosen is None else ("part", base, chosen)
        if name not in ("DistributedSampler", "RandomSampler", "SequentialSampler", "") and not _nothing(made):
            return None
    return base


def _nothing(made: Made) -> bool:
    return isinstance(made.node, ast.Constant) and made.node.value is None


def samples_of(program: Program, one: Made, depth: int = 0) -> Key | None:
    """A set's key, without what is done to its pictures; a rank's share stands for the whole."""
    found = resolve(program, one)
    call = found[0].node if len(found) == 1 else None
    if call is None or depth > 4:
        return None
    if isinstance(call, ast.Tuple) and isinstance(split := call.elts[0], ast.Call) and split.args:
        base = samples_of(program, within(found[0], split.args[0]), depth + 1)
        return None if base is None else ("part", base, split, *map(ast.dump, call.elts[1:]))
    if not isinstance(call, ast.Call):
        return key(program, found[0])
    made = found[0]
    if _changed(program, made):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "shard" and ranked(call):
        return samples_of(program, within(made, call.func.value), depth + 1)
    if last_name(call.func) == "Subset" and len(call.args) > 1:
        base = samples_of(program, within(made, call.args[0]), depth + 1)
        chosen = _chosen(program, within(made, call.args[1]))
        if base is None or chosen is None:
            return None
        return base if chosen == _ALL else ("part", base, chosen)
    if _drawn(program, call):
        return ("drawn", call)  # each time others
    owner, meaning = definition(program, call.func), qualified(program, call.func)
    if isinstance(owner, ast.ClassDef):
        return of_class(program, made, owner)
    if not _DATASETS.search(meaning):
        return key(program, made)
    shown = "is_training" if meaning.startswith("timm") else ""
    kept = [each for each in call.keywords if each.arg is None or not (DRESS.search(each.arg) or each.arg == shown)]
    parts = [each for each in call.args if not dresses(program, within(made, each))]
    return call_key(program, made, call.func, parts, kept)


def _changed(program: Program, made: Made) -> bool:
    """Whether a set was changed after it was made: `val_set.files = files[:100]`, `val_set.use("val")`."""
    for node in made.trail:
        if isinstance(node, ast.Name | ast.Attribute) and node in program.owner:
            text = text_of(node)
            for known in program.owner[node].attributes:
                owner, _, name = known.partition("[")[0].rpartition(".")
                if owner == text and text != "self" and not DRESS.search(name):
                    return True
            if text in _told(program, program.owner[node]):
                return True
    return False


@remembered
def _told(_: Program, source: Source) -> frozenset[str]:
    """The objects whose methods are called for what they do, as statements: `val_set.use("val")`."""
    found = [each.value.func for each in source.of(ast.Expr) if isinstance(each.value, ast.Call)]
    return frozenset(text_of(each.value) for each in found if isinstance(each, ast.Attribute))


def _drawn(program: Program, call: ast.Call) -> bool:
    """Whether a set's samples are drawn at random as it is made, by its class or by its class's name."""
    owner = definition(program, call.func)
    if isinstance(owner, ast.ClassDef):
        inner = [last_name(each.func) for each in walk(owner) if isinstance(each, ast.Call)]
        return bool({"randn", "rand", "randint"} & {*inner}) and "manual_seed" not in inner
    return owner is None and bool(re.search(r"^(Random|Fake|Dummy|Synthetic)\w*(Dataset|Data)$", last_name(call.func)))


def _chosen(program: Program, one: Made) -> Key | None:
    """The key of a subset's numbers, with a rank's share of some standing for all of them."""
    found = resolve(program, one)
    if len(found) != 1:
        return None
    match found[0].node:
        case ast.Call(func=function, args=[first, *_]) if last_name(function) in ("range", "arange") and ranked(first):
            return _ALL if isinstance(first, ast.Name | ast.Attribute | ast.Call) else None  # from n + rank: of a part
        case ast.Call(func=function, args=[inner]) if last_name(function) in ("list", "tolist"):
            return _chosen(program, within(found[0], inner))
        case ast.Subscript(value=value, slice=ast.Slice(lower=ast.expr() as lower, step=ast.expr())) if ranked(lower):
            return _chosen(program, within(found[0], value))
        case ast.AST() as node if ranked(node):
            return None
    return key(program, found[0])
