"""LS4: what ranks write and read: checkpoints and weights."""

from __future__ import annotations

import ast
import re

from lockstep_lint.facts.modules import Scope
from lockstep_lint.facts.program import Value
from lockstep_lint.facts.ranks import RANK, alone, guard
from lockstep_lint.facts.training import COLLECTIVES, Facts
from lockstep_lint.facts.tree import argument, dotted_name, keyword, last_name, literal, receiver, walk_calls, words
from lockstep_lint.rules import Places, rule
from lockstep_lint.rules.data import one_goes_first

STATEFUL = ("Adam", "AdamW", "RMSprop", "LAMB", "Adagrad", "RAdam", "NAdam")
SCHEDULES = ("StepLR", "MultiStepLR", "CosineAnnealingLR", "ExponentialLR", "OneCycleLR", "ReduceLROnPlateau")


def _torch(facts: Facts, name: str) -> list[tuple[ast.Call, Scope]]:
    """The calls of torch.save or torch.load with an argument that the program reaches."""
    calls = facts.calls(name)
    return [(call, scope) for call, scope in calls if facts.qualified(call, scope) == f"torch.{name}" and call.args]


@rule("LS401", "saved-on-every-rank")
def saved_on_every_rank(facts: Facts) -> Places:
    """Every rank writes the same file.

    N processes write one file at once: sometimes a checkpoint is damaged, and nobody notices until it is needed.

    torch.save runs on each rank, with the same path; or all ranks empty one log, by a FileHandler in mode "w".

    Wrong:
        torch.save(model.module.state_dict(), path)
    Right:
        if rank == 0:
            torch.save(model.module.state_dict(), path)
    """
    if not facts.several or facts.kinds <= {"lightning"} or not facts.step_loops:
        return
    yield from _emptied_logs(facts)
    for call, scope in _torch(facts, "save") if not facts.sharded_model else ():
        if not facts.per_rank(scope) or not _called(facts, scope) or alone(facts, call, scope):
            continue
        if guard(facts, call, scope) is not None or _has_rank(facts, argument(call, 1, "f"), scope):
            continue
        if not _weights(facts, call, scope) or one_goes_first(facts, call, scope):
            continue
        tested = words(*(each.test for each in facts.conditions(call, scope))) & {*scope.params}
        sites = [each for each in facts.sites.get(scope, []) if all(each.argument(scope, name) for name in tested)]
        places = [(site.call, site.scope) for site in sites if site.scope in facts.reached]
        open_ = [each for each in places if guard(facts, *each) is None and not alone(facts, *each)]
        if not open_ and facts.sites.get(scope):
            continue
        if 0 < len(open_) < len(places):  # some of its callers ask for the rank: it is the others that should
            yield from ((*each, "") for each in open_ if not one_goes_first(facts, *each))
        else:
            yield call, scope, ""


def _emptied_logs(facts: Facts) -> Places:
    """Logs that each rank opens anew."""
    for call, scope in facts.calls("FileHandler", "basicConfig"):
        mode = argument(call, 1, "mode") if last_name(call) == "FileHandler" else keyword(call, "filemode")
        if facts.constant(mode, scope) != "w" or not facts.per_rank(scope) or alone(facts, call, scope):
            continue
        path = argument(call, 0, "filename")
        if guard(facts, call, scope) is None and path and not _has_rank(facts, path, scope):
            yield call, scope, "a log"


def _called(facts: Facts, scope: Scope) -> bool:
    """Whether it is known who calls a function: only then is it known who guards it."""
    while scope.is_function and scope.outer is not None:
        if facts.sites.get(scope):
            return True
        scope = scope.outer
    return not scope.is_class


def _weights(facts: Facts, call: ast.Call, scope: Scope) -> bool:
    """Whether weights are written, and to a file."""
    if any(last_name(value.expr) == "BytesIO" for value in facts.sources(argument(call, 1, "f"), scope)):
        return False
    said = words(*(value.expr for value in facts.sources(call.args[0], scope)))
    return any(re.search(r"state|model|net|checkpoint|ckpt|weight|params", word, re.I) for word in said)


def _has_rank(facts: Facts, path: ast.expr | None, scope: Scope) -> bool:
    """Whether a path has the rank in it."""
    for value in facts.sources(path, scope):
        names = [node for node in ast.walk(value.expr) if isinstance(node, (ast.Name, ast.Attribute))]
        sources = [each.expr for name in names for each in facts.sources(name, value.scope)]
        if any(RANK.search(word) or "rank" in word or word == "getpid" for word in words(value.expr, *sources)):
            return True
    return False


@rule("LS402", "load-without-map-location")
def load_without_map_location(facts: Facts) -> Places:
    """A checkpoint is loaded without map_location.

    Each rank loads the tensors onto GPU 0, where rank 0 saved them: that GPU needs N times the memory, and may run out.

    Wrong:
        checkpoint = torch.load(path)
    Right:
        checkpoint = torch.load(path, map_location="cpu")
    """
    saves = _torch(facts, "save")
    if not facts.by_hand or not facts.wraps or not saves or any(_on_cpu(call, scope) for call, scope in saves):
        return
    loads = _torch(facts, "load")
    plain = [
        (c, s) for c, s in loads if len(c.args) == 1 and not any(k.arg in ("map_location", None) for k in c.keywords)
    ]
    for call, scope in plain:
        if any(where is scope and (other, where) not in plain for other, where in loads):
            continue  # the other case has it
        if not facts.per_rank(scope) or guard(facts, call, scope) is not None or alone(facts, call, scope):
            continue
        if _resumes(facts, call, scope):
            yield call, scope, ""


def _on_cpu(call: ast.Call, scope: Scope) -> bool:
    """Whether a save writes tensors of the CPU: its own arguments say so, or the model was moved there before."""
    moved = any(
        last_name(each) == "cpu" and isinstance(scope.module.parents.get(each), ast.Expr) for each in scope.calls
    )
    return moved or "cpu" in words(call.args[0])


def _resumes(facts: Facts, call: ast.Call, scope: Scope) -> bool:
    """Whether what is loaded goes into a model or an optimizer, and is not meant as a beginning."""
    said = words(call, *(condition.test for condition in facts.conditions(call, scope))) | {scope.name}
    path = str(literal(call.args[0]))
    said = said - {path} | {path.rpartition("/")[2]}  # a folder may be called anything
    if any(re.search(r"pretrain|backbone|teacher|imagenet|init|finetune", word, re.I) for word in said):
        return False
    names = facts.derived(facts.results(call, scope), scope)
    loads = [each for each in scope.calls if last_name(each) == "load_state_dict"]
    return any(names & words(each) or call in walk_calls(each) for each in loads)


@rule("LS403", "module-saved")
def module_saved(facts: Facts) -> Places:
    """The state of the DDP wrapper is saved, with `module.` before each key.

    The file does not load into a plain model: all keys are missing, or, with strict=False, no weight is loaded and
    there is no error.

    DDP calls the model inside it module. A program that loads the file into the wrapper again is left alone.

    Wrong:
        torch.save(model.state_dict(), path)  # a DistributedDataParallel
    Right:
        torch.save(model.module.state_dict(), path)
    """
    stripped = r"""["']module\.["']|\[7:\]|consume_prefix|lstrip\(["']module"""
    if not facts.wraps or facts.kinds & {"accelerate", "fabric", "lightning"}:
        return
    if any(module.says(stripped) for module in facts.project.modules.values() if module):
        return
    if any(facts.is_wrapped(receiver(call), scope) for call, scope in facts.calls("load_state_dict")):
        return
    for call, scope in _torch(facts, "save"):
        for value in _saved(facts, call, scope):
            model = receiver(value.expr) if isinstance(value.expr, ast.Call) else None
            if last_name(value.expr) != "state_dict" or not facts.is_wrapped(model, value.scope):
                continue
            sources = [each.expr for each in facts.sources(model, value.scope)]
            tests = words(*(condition.test for condition in facts.conditions(value.expr, value.scope)))
            if any(isinstance(each, ast.Attribute) and each.attr == "module" for each in sources):
                continue
            if not alone(facts, value.expr, value.scope) and not re.search(
                "module|attr|isinstance|Par", " ".join(tests)
            ):
                yield value.expr, value.scope, ""


def _saved(facts: Facts, call: ast.Call, scope: Scope) -> list[Value]:
    """What a save writes: the values of a dictionary one by one."""
    found: list[Value] = []
    for value in facts.sources(call.args[0], scope):
        found.append(value)
        if isinstance(value.expr, ast.Dict):
            found += [each for part in value.expr.values for each in facts.sources(part, value.scope)]
    return found


@rule("LS404", "state-lost")
def state_lost(facts: Facts) -> Places:
    """What a resumed run needs is not saved.

    A resumed run gives another result: momentum starts at 0, or the schedule at its beginning.

    The program continues at the epoch of a checkpoint, but the checkpoint lacks the rest.

    Wrong:
        torch.save({"model": model.state_dict(), "epoch": epoch}, path)
    Right:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    """
    resumes = r"""(?i)(ckpt|checkpoint|state|snapshot|saved|resume|load)\w*\[["']\w*epoch"""
    if not facts.step_loops or not _torch(facts, "load") or not facts.says(resumes):
        return
    saved: list[tuple[ast.Dict, Scope]] = []
    for call, scope in _torch(facts, "save"):
        dicts = [(v.expr, v.scope) for v in facts.sources(call.args[0], scope) if isinstance(v.expr, ast.Dict)]
        if not dicts and not any(last_name(each) == "state_dict" for each in walk_calls(call.args[0])):
            return  # something unknown is saved
        saved += dicts
    full = [(each, scope) for each, scope in saved if any("epoch" in str(literal(key)).lower() for key in each.keys)]
    if not full or any(None in each.keys or _grows(each, scope) for each, scope in saved):
        return
    said = " ".join(words(*(each for each, _ in saved))).lower()
    missing = []
    if _optimizer_has_state(facts) and not re.search(r"optim|\bopt|solver", said):
        missing.append("optimizer")
    if _schedule_has_state(facts) and not re.search(r"sched|\blr", said):
        missing.append("scheduler")
    if missing:
        yield *full[0], f"without {' and '.join(missing)}"


def _grows(made: ast.Dict, scope: Scope) -> bool:
    """Whether something is added to a dictionary after it was made."""
    for name, bindings in scope.bindings.items():
        if any(binding.value is made for binding in bindings):
            changed = any(binding.kind == "item" for binding in bindings)
            return changed or any(dotted_name(call.func) == f"{name}.update" for call in scope.calls)
    return False


def _optimizer_has_state(facts: Facts) -> bool:
    momenta = [(keyword(call, "momentum"), scope) for call, scope in facts.calls("SGD")]
    return any(facts.calls(*STATEFUL)) or any(m is not None and facts.constant(m, s) != 0 for m, s in momenta)


def _schedule_has_state(facts: Facts) -> bool:
    """Whether a schedule counts its own steps, and is not set to the epoch."""
    made = [call for call, _ in facts.calls(*SCHEDULES)]
    steps = [c for c, _ in facts.calls("step") if re.search("sched|^lr", last_name(receiver(c)), re.I)]
    told = any(call.args for call in steps) and not any(last_name(call) == "ReduceLROnPlateau" for call in made)
    return bool(made and steps) and not told and not facts.says("last_epoch")


@rule("LS406", "load-before-saved")
def load_before_saved(facts: Facts) -> Places:
    """Nothing lets the ranks wait between saving and loading.

    Ranks read a file that rank 0 has not finished, or not begun: an error, or the weights of an earlier save.

    Wrong:
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
        model.module.load_state_dict(torch.load("model.pt", map_location="cpu"))
    Right:
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
        dist.barrier()
        model.module.load_state_dict(torch.load("model.pt", map_location="cpu"))
    """
    saves = [(c, s) for c, s in _torch(facts, "save") if guard(facts, c, s)] if facts.by_hand else []
    for load, inside in _torch(facts, "load") if saves else ():
        path = (load.args[0], inside)
        written = [(c, s) for c, s in saves if _same_file(facts, path, (argument(c, 1, "f"), s))]
        lasts = {scope: call.lineno for save in written for scope, call in _places(facts, *save)}
        for scope, call in _places(facts, load, inside) if guard(facts, load, inside) is None else ():
            between = [c for c in scope.calls if lasts.get(scope, 1 << 30) < c.lineno < call.lineno]
            called = {name for each in between for name in (last_name(each), *facts.names_called(each, scope, 2))}
            after = lasts.get(scope, 1 << 30) < call.lineno and guard(facts, call, scope, 0) is None
            if after and not COLLECTIVES & called and facts.per_rank(scope):
                yield load, inside, ""
                break


def _places(facts: Facts, call: ast.Call, scope: Scope) -> list[tuple[Scope, ast.Call]]:
    """Where a line runs, by its function: its own place, and the calls of that function."""
    sites = [(site.scope, site.call) for site in facts.sites.get(scope, []) if site.scope in facts.reached]
    return [(scope, call), *sites]


def _same_file(facts: Facts, one: tuple[ast.expr | None, Scope], other: tuple[ast.expr | None, Scope]) -> bool:
    """Whether two paths are the same expression, or end in the same file name."""
    texts = []
    for path, scope in (one, other):
        values = facts.sources(path, scope)
        said = {word for value in values for word in words(value.expr) if re.search(r"\w\.(pth?|ckpt|tar|bin)$", word)}
        texts.append({*said, *(ast.dump(path) for path in (path,) if path and one[1] is other[1])})
    return bool(texts[0] & texts[1])


@rule("LS407", "epoch-not-resumed")
def epoch_not_resumed(facts: Facts) -> Places:
    """A resumed run begins at epoch 0 again.

    The order of the data and the schedule start from the beginning, and the run is longer than it should be.

    The epoch is read from a checkpoint, and nothing but tests and messages uses it.

    Wrong:
        start_epoch = checkpoint["epoch"] + 1
        for epoch in range(epochs):
            train(epoch)
    Right:
        start_epoch = checkpoint["epoch"] + 1
        for epoch in range(start_epoch, epochs):
            train(epoch)
    """
    for scope in facts.reached if facts.step_loops and any(_torch(facts, "load")) else ():
        for name, bindings in scope.bindings.items():
            computed = any(each.kind == "assign" and not isinstance(each.value, ast.Constant) for each in bindings)
            if not computed or not re.fullmatch(r"(start|resume|initial|begin)\w*epoch", name):
                continue
            reads = [n for n in ast.walk(scope.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
            if all(_only_shown(scope, node) for node in reads if node.id == name):
                yield bindings[-1].node, scope, name


def _only_shown(scope: Scope, node: ast.AST) -> bool:
    """Whether a value is only tested or put into a text."""
    for _, parent in scope.module.ancestors(node):
        if isinstance(parent, ast.Call):
            return bool(re.search("print|info|format|log|warn|exists|isfile", last_name(parent)))
        if isinstance(parent, (ast.JoinedStr, ast.stmt)):
            return isinstance(parent, (ast.JoinedStr, ast.If, ast.Assert))
    return False


@rule("LS409", "resume-ignored")
def resume_ignored(facts: Facts) -> Places:
    """The option to resume is never read.

    A run that should go on begins anew, without a word, and may overwrite the checkpoints of the first one.

    Wrong:
        parser.add_argument("--resume", help="checkpoint to go on from")
        train(args.epochs)
    Right:
        parser.add_argument("--resume", help="checkpoint to go on from")
        train(args.epochs, torch.load(args.resume, map_location="cpu") if args.resume else None)
    """
    if not facts.step_loops or facts.says(r"vars\(|__dict__|\*\*args|parse_known|getattr\(|from_argparse|merge"):
        return
    for name, option in facts.options.items():
        asked = re.fullmatch(r"(auto_?)?resume\w*|start_epoch", name)
        if asked and not facts.says(rf"""\.{name}\b|["']{name}["']"""):
            module = next(each for each in facts.modules if option in each.parents)
            yield option, module.scope_of(option), ""


@rule("LS410", "directory-race")
def directory_race(facts: Facts) -> Places:
    """Ranks make the same directory at once.

    Two ranks find that it is missing, and the second one ends with FileExistsError: the first run on a machine breaks
    now and then.

    Wrong:
        if not os.path.exists(folder):
            os.makedirs(folder)
    Right:
        os.makedirs(folder, exist_ok=True)
    """
    if not facts.kinds & {"torch", "horovod", "accelerate", "deepspeed"} or not facts.step_loops:
        return
    for call, scope in facts.calls("makedirs", "mkdir"):
        tests = words(*(condition.test for condition in facts.conditions(call, scope)))
        if keyword(call, "exist_ok") or len(call.args) > 2 or not tests & {"exists", "isdir", "is_dir"}:
            continue
        if facts.without_gradients(call, scope):
            continue  # a tool for one process
        caught = any(isinstance(parent, ast.Try) and parent.handlers for _, parent in scope.module.ancestors(call))
        if caught or not facts.per_rank(scope) or alone(facts, call, scope) or guard(facts, call, scope) is not None:
            continue
        path = call.args[0] if call.args else receiver(call)
        if not _has_rank(facts, path, scope) and not one_goes_first(facts, call, scope):
            yield call, scope, ""
