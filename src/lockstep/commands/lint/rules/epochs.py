"""The rule about a sampler's epoch: who is told which epoch it is, and who runs over the loader again and again."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import callee, definition, descendants, lineage
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import LOADERS, loops, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.roles import SHARDING, constant, given, of_loader, samplers, sharding, training_loaders
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.mending import telling
from lockstep.commands.lint.rules.orders import own_epochs, same_draw, told_to_one
from lockstep.commands.lint.several import lightning
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk

_OF_LOADER = ("sampler", "batch_sampler", "dataset")
_NOBODY: frozenset[ast.AST] = frozenset()


@rule(
    "LS101",
    "no-set-epoch",
    "set_epoch is never called",
    result="every epoch has the order of the first one, on 2 processes and more; each rank sees the same part in all "
    "of them",
    why="DistributedSampler shuffles by seed + epoch, and its epoch stays 0 until set_epoch says otherwise",
    mend="for epoch in range(epochs):\n    sampler.set_epoch(epoch)",
)
def no_set_epoch(program: Program) -> Iterator[Hit]:
    """A sharding sampler that shuffles, whose loader is run over in each epoch, and which no set_epoch reaches."""
    if lightning(program) or not program.whole:
        return
    calls = program.named.get("set_epoch", [])
    for loader, around in training_loaders(program).items():
        if not _again(program, loader, around) or _told_by_library(program, loader):
            continue
        for sampler in sharding(program, loader):
            if constant(program, given(program, sampler, "shuffle", 3)) is not False:
                yield from _untold(program, sampler, loader, calls, around)
        if _cut_by_timm(program, loader):
            yield from _untold(program, loader, loader, calls, around)
        for sampler in own_epochs(program, loader):
            yield from _untold(program, sampler, loader, calls, around)
        yield from same_draw(program, loader)
    if not any(_reached(program, call) != _NOBODY for call in calls if not _dead(program, call)):
        yield from _of_ignite(program)


def _cut_by_timm(program: Program, loader: ast.Call) -> bool:
    """create_loader(..., is_training=True, distributed=True), which makes a sampler that shuffles."""
    options = [given(program, loader, name) for name in ("distributed", "is_training")]
    return last_name(loader.func) == "create_loader" and all(constant(program, each) is True for each in options)


def _untold(
    program: Program, sampler: ast.Call, loader: ast.Call, calls: list[ast.Call], around: list[Loop]
) -> Iterator[Hit]:
    """A sampler that no call reaches; or the calls that reach it, where all of them tell it the same."""
    told, idle = list[ast.Call](), list[ast.Call]()
    for call in calls:
        never = _dead(program, call)
        reached = _reached(program, call)
        if reached is None and not never:
            return  # it may be this one
        if reached is not None and (sampler in reached or loader in reached):
            (idle if never else told).append(call)
    if not told:
        if idle:
            yield Hit(idle[0], "nothing calls the function that it stands in")
        else:
            yield Hit(sampler, "", telling(program, sampler, around))
    elif all(told_to_one(program, call) for call in told):
        yield Hit(told[0], "the first rank alone is told, so that the ranks' parts overlap")
    elif all(_tells_once(program, call) for call in told):
        yield Hit(told[0], "it tells the same epoch each time")


@remembered
def _reached(program: Program, call: ast.Call) -> frozenset[ast.AST] | None:
    """The samplers, and loaders, that a set_epoch tells; None where that could be any."""
    if not isinstance(call.func, ast.Attribute):
        return None if callee(program, call) is None else _NOBODY
    owner, made = call.func.value, origins(program, call.func.value)
    own = class_of(program.owner[call], call)
    if isinstance(owner, ast.Name) and owner.id == "self" and own is not None:
        names = [each.name for each in [own, *descendants(program, own)]]
        return frozenset(each for name in names for each in program.named.get(name, []))
    ways: list[str] = []
    while made == [owner] and isinstance(owner, ast.Attribute) and owner.attr in _OF_LOADER:
        ways.append(owner.attr)
        owner = owner.value
        made = origins(program, owner)
    found: set[ast.AST] = set()
    for each in made:
        if isinstance(each, ast.Constant) and each.value is None:
            continue
        if not isinstance(each, ast.Call) or each is owner:
            return None
        local = definition(program, each.func)
        if last_name(each.func) in LOADERS and local is None:
            node = of_loader(program, each, "dataset")
            if "dataset" in ways and node is not None:
                found.update(origins(program, node))
            elif ways or not _asks(program, call):
                found |= {each, *samplers(program, each)}
        elif last_name(each.func) in SHARDING or isinstance(local, ast.ClassDef):
            found.add(each)
            found.update(one for arg in each.args for one in made_by(program, arg, *SHARDING, *LOADERS))
        else:
            return None
    return frozenset(found)


def _asks(program: Program, call: ast.Call) -> bool:
    """`if hasattr(loader, "set_epoch"):`, which torch's own DataLoader has not; Accelerate's and Fabric's have."""
    tests = [each.test for each in above(program.owner[call], call) if isinstance(each, ast.If)]
    prepared = any(program.named.get(name) for name in ("prepare", "setup_dataloaders"))
    return not prepared and any("hasattr" in text_of(each) for each in tests)


@remembered
def _dead(program: Program, call: ast.Call) -> bool:
    """Whether a call stands in a function, a method or a class that nothing in the program reads the name of."""
    source = program.owner[call]
    outer = [each for each in above(source, call) if isinstance(each, Function | ast.ClassDef)]
    if not outer or any(each.decorator_list for each in outer) or outer[-1].name in ("main", "run"):
        return False
    if not any(_ways_known(program, loop) for loop in step_loops(program)):
        return False  # a part of something: others call it
    if outer[-1].name not in _read(program):
        return True
    known = outer[-1]
    if not (len(outer) == 2 and isinstance(known, ast.ClassDef) and isinstance(outer[0], Function)):
        return False
    bases = [last_name(base) for each in lineage(program, known) for base in each.bases]
    local = all(isinstance(definition(program, base), ast.ClassDef) for base in known.bases)
    free = local or set(bases) <= {"object", "Module", "ABC"}
    return free and not outer[0].name.startswith("__") and outer[0].name not in _read(program)


@remembered
def _read(program: Program) -> frozenset[str]:
    """The names that the program reads; a string counts as well: something may be looked up by it."""
    found = set()
    for source in program.sources:
        for node in source.of(ast.Name, ast.Attribute, ast.Constant, ast.ImportFrom):
            match node:
                case ast.Name(ctx=ast.Load(), id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    found.add(name)
                case ast.ImportFrom(names=names):
                    found.update(each.name for each in names if each.asname)
    return frozenset(found)


def _tells_once(program: Program, call: ast.Call) -> bool:
    """Whether a call tells a number that is written out, or stands in no loop."""
    node = next(iter([*call.args, *(each.value for each in call.keywords)]), None)
    if node is not None and _fixed(program, node):
        return True
    return _ways_known(program, call) and not any(loops(program, call))


def _fixed(program: Program, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    if not isinstance(node, ast.Name):
        return False
    found = bindings(program, node, node.id)
    if len(found) != 1:
        return False
    if found[0].kind == "param":
        function = function_of(program.owner[node], node)
        known = sites(program, function) if function is not None else []
        given_ = [argument(site, node.id) for site in known]
        return bool(known) and all(each is not None and _fixed(program, each) for each in given_)
    return found[0].kind == "value" and isinstance(found[0].value, ast.Constant)


def _ways_known(program: Program, node: ast.AST, depth: int = 0) -> bool:
    """Whether all ways by which a place is come by are calls that can be seen."""
    function = function_of(program.owner[node], node)
    if function is None or function.name == "main":
        return True
    known = sites(program, function)
    return bool(known) and depth < 6 and all(_ways_known(program, site.call, depth + 1) for site in known)


def _again(program: Program, loader: ast.Call, around: list[Loop]) -> bool:
    """Whether training runs over a loader more than once: in a loop of epochs, or by whoever draws from it."""
    known = step_loops(program)
    if any(known[loop] for loop in around):
        return True
    for node, drawn in _passes(program):
        cycled = isinstance(node, ast.Call) and last_name(node.func) == "cycle"
        if (cycled or any(loops(program, node))) and loader in origins(program, drawn):
            return True
    return False


@remembered
def _passes(program: Program) -> list[tuple[ast.AST, ast.expr]]:
    """Where something begins a pass that is no training loop's own: iter(x), cycle(x), yield from x, and over what."""
    found: list[tuple[ast.AST, ast.expr]] = []
    for name in ("iter", "cycle"):
        found += [(call, call.args[0]) for call in program.named.get(name, []) if len(call.args) == 1]
    for source in program.sources:
        for node in source.of(ast.YieldFrom, ast.For):
            if isinstance(node, ast.YieldFrom):
                found.append((node, node.value))
            elif isinstance(node, ast.For) and any(isinstance(each, ast.Yield) for each in walk(node)):
                found.append((node, node.iter))
    return found


def _told_by_library(program: Program, loader: ast.Call) -> bool:
    """Fabric's and Accelerate's loaders set the epoch of any sampler that has one."""
    names = ("setup_dataloaders", "prepare", "prepare_data_loader")
    calls = [call for name in names for call in program.named.get(name, []) if definition(program, call.func) is None]
    return any(loader in origins(program, each) for call in calls for each in call.args)


def _of_ignite(program: Program) -> Iterator[Hit]:
    """The loader that Ignite's engine runs over, without a handler that tells its sampler."""
    if any(each.arg == "train_sampler" for call in program.calls for each in call.keywords):
        return
    for call in program.named.get("run", []):
        if not call.args or given(program, call, "max_epochs") is None:
            continue
        for made in origins(program, call.args[0]):
            if isinstance(made, ast.Call) and last_name(made.func) == "DataLoader":
                yield from (Hit(each) for each in sharding(program, made))
            auto = isinstance(made, ast.Call) and last_name(made.func) == "auto_dataloader"
            if auto and isinstance(made, ast.Call) and constant(program, given(program, made, "shuffle")) is True:
                yield Hit(made)
