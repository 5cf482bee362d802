"""What a program trains: loaders and samplers, training and evaluation loops, wrapped models, collectives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lockstep_lint.facts.modules import LOOPS, Module, Project, Scope
from lockstep_lint.facts.program import PREPARED, Program, Value, calls_below
from lockstep_lint.facts.ranks import optional
from lockstep_lint.facts.tree import (
    argument,
    dotted_name,
    keyword,
    last_name,
    literal,
    receiver,
    walk_calls,
    within,
    words,
)

Loop = ast.For | ast.AsyncFor | ast.While

DDP = ("DistributedDataParallel", "DDP", "NativeDDP", "ApexDDP")
FSDP = ("FullyShardedDataParallel", "FSDP", "fully_shard", "parallelize_module")
BACKWARD = frozenset(["backward", "manual_backward", "loss_scaler"])  # the last: timm's way
PREPARES = frozenset(["prepare", "setup_dataloaders", "prepare_data_loader"])  # each rank gets a part of the loader
SAMPLER = re.compile(r"^Distributed\w*Sampler|^RASampler$|Distributed\w*Sampler$")
EVALUATION = re.compile(
    r"(^|_|\b)(val|valid|validat(e|ion)|test|testing|eval|evaluat(e|ion)|dev|infer|inference|predict)(\d*|s)(_|\b|$)",
    re.I,
)
TRAINING = re.compile(r"(^|_|\b)(train|training|trn|tr)(_|\b|$)", re.I)
MODEL = re.compile(
    r"model|network|^net|net$|backbone|encoder|classifier|segmentor|detector|student|generator|ddp", re.I
)
COLLECTIVES = frozenset(
    "all_reduce all_gather all_gather_into_tensor all_gather_object reduce broadcast broadcast_object_list gather"
    " gather_object scatter reduce_scatter barrier monitored_barrier all_to_all allreduce allreduce_ allgather"
    " broadcast_parameters broadcast_optimizer_state broadcast_object wait_for_everyone gather_for_metrics".split()
)
GRADIENTS_OFF = frozenset(["no_grad", "inference_mode", "set_grad_enabled"])
REDUCES = re.compile(  # names of functions that may put the ranks' numbers together
    r"reduce|gather|sync_|_sync|synchron(?!ize$)|aggregate|collect|dist_|average_(across|over)|broadcast|across", re.I
)
FRAMEWORKS = (  # a call, a part of its full name, and what it starts
    ("init", "horovod", "horovod"),
    ("Accelerator", "accelerate", "accelerate"),
    ("Fabric", "lightning", "fabric"),
    ("Parallel", "ignite", "ignite"),
    ("auto_model", "ignite", "ignite"),
    ("initialize", "deepspeed", "deepspeed"),
    ("init_distributed", "deepspeed", "deepspeed"),
)


def spoken(name: str) -> str:
    """A name with its parts set apart: `valLoader` becomes `val_Loader`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)


def for_evaluation(name: str) -> bool:
    """Whether a name says validation or test, and not training."""
    return bool(EVALUATION.search(spoken(name))) and not TRAINING.search(spoken(name))


def for_training(name: str) -> bool:
    """Whether a name says training, and not validation or test."""
    return bool(TRAINING.search(spoken(name))) and not EVALUATION.search(spoken(name))


def sums_of(loop: ast.AST) -> frozenset[str]:
    """The names that a loop adds its batches' numbers up in, or collects them."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and literal(node.value) != 1:
            found.add(last_name(node.target))
        elif isinstance(node, ast.Call) and last_name(node) in ("update", "append", "add", "extend", "add_batch"):
            found.add(last_name(receiver(node)))
    return frozenset(found) - {"self", "", "pbar", "bar", "progress"}


@dataclass(frozen=True, eq=False)
class Loader:
    """A call that makes a DataLoader."""

    call: ast.Call
    scope: Scope
    closed: bool  # whether all its arguments are known

    @property
    def dataset(self) -> ast.expr | None:
        """The data set."""
        return argument(self.call, 0, "dataset")

    @property
    def shuffle(self) -> ast.expr | None:
        """The argument of that name."""
        return argument(self.call, 2, "shuffle")

    @property
    def sampler(self) -> ast.expr | None:
        """The sampler, or the sampler of batches."""
        return argument(self.call, 3, "sampler") or argument(self.call, 4, "batch_sampler")


@dataclass(frozen=True, eq=False)
class StepLoop:
    """A loop that goes over batches and trains on each."""

    node: Loop
    scope: Scope
    backward: ast.Call
    backward_scope: Scope


class Facts(Program):
    """A program, and what the rules ask about its training; each answer is worked out once."""

    def __init__(self, project: Project, root: Module, whole: bool = False) -> None:
        super().__init__(project, root, whole)
        self._loaders: dict[ast.Call, Loader] = {}

    # Which processes

    @cached_property
    def kinds(self) -> frozenset[str]:
        """By what it runs several processes: torch, horovod, accelerate, fabric, lightning, ignite, deepspeed."""
        found = set()
        for call, scope in self.calls("init_process_group"):
            if "dist" in self.qualified(call, scope) and (self.wraps or self.spawns or not optional(self, call, scope)):
                found.add("torch")
        if self.wraps and any(self.calls("init_distributed_mode", "init_distributed")):
            found.add("torch")
        for name, module, kind in FRAMEWORKS:
            made = [call for call, scope in self.calls(name) if module in self.qualified(call, scope)]
            if any(literal(keyword(call, "devices")) != 1 or keyword(call, "num_nodes") for call in made):
                found.add(kind)
        for call, scope in self.calls("Trainer"):
            if "lightning" in self.qualified(call, scope) and self._lightning_several(call, scope):
                found.add("lightning")
        return frozenset(found)

    def _lightning_several(self, call: ast.Call, scope: Scope) -> bool:
        for name in ("strategy", "accelerator", "distributed_backend", "plugins"):
            values = self.sources(keyword(call, name), scope)
            if any(re.search("ddp|fsdp|deepspeed", word, re.I) for value in values for word in words(value.expr)):
                return True
        numbers = [literal(keyword(call, name)) for name in ("devices", "gpus", "num_nodes")]
        return any((isinstance(n, int) and n not in (0, 1)) or n in ("-1", "auto") for n in numbers)

    @property
    def several(self) -> bool:
        """Whether the program runs several processes at all."""
        return bool(self.kinds)

    @property
    def by_hand(self) -> bool:
        """Whether it does so by torch.distributed or Horovod alone: what is sent is in the program's own lines."""
        others = {"accelerate", "fabric", "lightning", "deepspeed"}
        return bool(self.kinds & {"torch", "horovod"}) and not self.kinds & others

    @cached_property
    def wraps(self) -> list[tuple[ast.Call, Scope]]:
        """Calls that wrap a model in DDP."""
        return list(self.calls(*DDP))

    @cached_property
    def spawns(self) -> bool:
        """Whether the program starts its processes itself."""
        return any(site.spawned for sites in self.sites.values() for site in sites)

    @cached_property
    def sharded_model(self) -> bool:
        """Whether a model is split over the ranks, by FSDP, DeepSpeed or the like."""
        return any(self.calls(*FSDP)) or "deepspeed" in self.kinds

    def is_wrapped(self, expr: ast.expr | None, scope: Scope) -> bool:
        """Whether a value is a model in DDP."""
        return any(
            isinstance(value.expr, ast.Call) and last_name(value.expr) in DDP for value in self.sources(expr, scope)
        )

    def collective(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call is one that all ranks have to reach together; those of a smaller group are left out."""
        name = last_name(call)
        if name not in COLLECTIVES or self.resolve(call.func, scope):
            return False
        if keyword(call, "group") or keyword(call, "process_group"):
            return False
        roots = ("torch.distributed.", "dist.", "horovod.", "hvd.", "ignite.distributed", "torch_xla")
        return (
            self.qualified(call, scope).startswith(roots)
            or name in ("wait_for_everyone", "gather_for_metrics")
            or last_name(receiver(call)).lower() in ("accelerator", "fabric")
        )

    # Loaders and samplers

    def loader(self, value: Value) -> Loader | None:
        """The loader that a value is, if it is a call of DataLoader."""
        call = value.expr
        if not isinstance(call, ast.Call) or not self._makes_loader(call, value.scope):
            return None
        if call not in self._loaders:
            closed = not any(isinstance(each, ast.Starred) for each in call.args)
            for each in call.keywords:
                closed = closed and (each.arg is not None or self._harmless(each.value, value.scope))
            self._loaders[call] = Loader(call, value.scope, closed)
        return self._loaders[call]

    def _makes_loader(self, call: ast.Call, scope: Scope) -> bool:
        if not last_name(call).endswith("Loader"):
            return False
        kind = self.resolve(call.func, scope)
        if kind is None:
            return last_name(call) == "DataLoader"
        bases = kind.node.bases if isinstance(kind.node, ast.ClassDef) else []
        return any(last_name(base) == "DataLoader" for base in bases) and "__init__" not in kind.inner

    def _harmless(self, expr: ast.expr, scope: Scope) -> bool:
        """Whether `**kwargs` is known and has neither shuffle nor a sampler in it."""
        owner = scope.lookup(expr.id) if isinstance(expr, ast.Name) else None
        if isinstance(expr, ast.Name) and owner:
            changed = any(binding.kind == "item" for binding in owner.bindings.get(expr.id, []))
            if changed or any(dotted_name(call.func) == f"{expr.id}.update" for call in owner.calls):
                return False
        known = False
        for value in self.sources(expr, scope):
            if isinstance(value.expr, ast.Dict):
                keys = [literal(key) for key in value.expr.keys]
            elif isinstance(value.expr, ast.Call) and last_name(value.expr) == "dict":
                keys = [each.arg for each in value.expr.keywords]
            elif isinstance(value.expr, (ast.Name, ast.IfExp)):
                continue
            else:
                return False
            if any(key in (None, "shuffle", "sampler", "batch_sampler") for key in keys):
                return False
            known = True
        return known

    @cached_property
    def loaders(self) -> list[Loader]:
        """All loaders that the program makes."""
        names = [name for name in self.by_name if name.endswith("Loader")]
        found = (self.loader(Value(call, scope)) for call, scope in self.calls(*names))
        return [each for each in found if each]

    def iterated(self, expr: ast.expr, scope: Scope, depth: int = 3) -> list[Value]:
        """What a loop's iterable may be, through enumerate, tqdm, iter and unknown calls around a loader."""
        found: list[Value] = []
        for value in self.sources(expr, scope):
            found.append(value)
            call = value.expr
            if not isinstance(call, ast.Call) or not depth or self.loader(value):
                continue
            target = self.resolve(call.func, value.scope)
            if last_name(call) in PREPARED or (target and not target.is_class and last_name(call) != "log_every"):
                continue  # its result has been followed already
            for each in (*call.args[:3], keyword(call, "iterable"), keyword(call, "loader")):
                if isinstance(each, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
                    found.extend(self.iterated(each, value.scope, depth - 1))
        return found

    def loaders_of(self, loop: Loop, scope: Scope) -> tuple[list[Loader], list[Value]]:
        """The loaders that a loop goes over, and all the values that were looked at on the way."""
        if isinstance(loop, ast.While) or last_name(loop.iter) == "range":
            nexts = [each.args[0] for each in walk_calls(loop) if last_name(each) == "next" and each.args]
            values = [value for each in nexts for value in self.iterated(each, scope)]
        else:
            values = self.iterated(loop.iter, scope)
        found = [loader for value in values if (loader := self.loader(value))]
        return list(dict.fromkeys(found)), values

    def samplers(self, loader: Loader) -> list[Value]:
        """The calls that make a loader's sampler; a sampler of batches is looked through."""
        found: list[Value] = []
        for value in self.sources(loader.sampler, loader.scope):
            call = value.expr
            if isinstance(call, ast.Call):
                found.append(value)
                if "Batch" in last_name(call):
                    for each in (*call.args[:1], keyword(call, "sampler")):
                        found += [v for v in self.sources(each, value.scope) if isinstance(v.expr, ast.Call)]
        return found

    def shares(self, loader: Loader, values: list[Value]) -> Value | None:
        """What gives each rank a part of its own of a loader's data: a sampler, Accelerate's prepare and the like."""
        for value in self.samplers(loader):
            given = [each.arg for each in value.expr.keywords] if isinstance(value.expr, ast.Call) else []
            if SAMPLER.search(last_name(value.expr)) or "num_replicas" in given or "world_size" in given:
                return value
        prepared = [v for v in values if isinstance(v.expr, ast.Call) and last_name(v.expr) in PREPARES]
        return prepared[0] if prepared else None

    def trains_on(self, loader: Loader) -> bool:
        """Whether a training loop goes over a loader."""
        return any(loader in self.loaders_of(each.node, each.scope)[0] for each in self.step_loops)

    # Loops

    @cached_property
    def step_loops(self) -> list[StepLoop]:
        """The innermost loops around each backward pass."""
        found: dict[Loop, StepLoop] = {}
        for call, scope in self.calls(*BACKWARD):
            for loop, where in self._loops_around(call, scope, 2):
                if not re.search(r"^(losses|models|optimizers|optims|nets)$", last_name(getattr(loop, "iter", None))):
                    found.setdefault(loop, StepLoop(loop, where, call, scope))
        return list(found.values())

    def epoch_loops(self, loop: StepLoop) -> list[tuple[Loop, Scope]]:
        """The loops around a training loop: those over epochs."""
        return list(self._loops_around(loop.node, loop.scope, 3))

    def _loops_around(self, node: ast.AST, scope: Scope, deep: int) -> Iterator[tuple[Loop, Scope]]:
        """The nearest loop around a line in its function, else those around the calls of the function."""
        while True:
            for child, parent in scope.module.ancestors(node):
                if isinstance(parent, LOOPS) and child in parent.body:
                    yield parent, scope
                    return
            if not (scope.is_function and scope.outer and scope.outer.is_function):
                break
            node, scope = scope.node, scope.outer  # a closure runs where it is defined
        for site in self.sites.get(scope, []) if deep else ():
            yield from self._loops_around(site.call, site.scope, deep - 1)

    @cached_property
    def evaluation_loops(self) -> list[tuple[Loop, Scope]]:
        """Loops that pass batches through a model without training it."""
        training = {loop.node for loop in self.step_loops}
        found: list[tuple[Loop, Scope]] = []
        for scope in self.reached:
            for loop in scope.loops:
                if loop in training or isinstance(loop, ast.While) or last_name(loop.iter) == "range":
                    continue
                if not any(self.is_model(call.func, where) for call, where in calls_below(loop, scope)):
                    continue
                if self.names_called(loop, scope, 2) & BACKWARD:
                    continue
                if self.without_gradients(loop, scope) or EVALUATION.search(spoken(scope.name)):
                    found.append((loop, scope))
        return found

    def is_model(self, function: ast.expr, scope: Scope) -> bool:
        """Whether an expression is a model, by its name."""
        name = last_name(function)
        if name == "module" and isinstance(function, ast.Attribute):
            name = last_name(function.value)
        known = self.resolve(function, scope) or name in scope.module.imports
        return isinstance(function, (ast.Name, ast.Attribute)) and not known and bool(MODEL.search(name))

    def without_gradients(self, node: ast.AST, scope: Scope) -> bool:
        """Whether a line stands under no_grad, or in a function that calls eval()."""
        if self.under_no_grad(node, scope):
            return True
        if GRADIENTS_OFF & words(*getattr(scope.node, "decorator_list", [])):
            return True
        if any(isinstance(each, ast.With) and GRADIENTS_OFF & words(each.items[0]) for each in ast.walk(node)):
            return True
        return scope.is_function and "eval" in self.names_called(scope.node, scope, 0)

    def under_no_grad(self, node: ast.AST, scope: Scope) -> bool:
        """Whether a line stands under `with no_grad()`."""
        around = [parent for _, parent in scope.module.ancestors(node) if isinstance(parent, ast.With)]
        return any(GRADIENTS_OFF & words(item.context_expr) for each in around for item in each.items)

    def always_in(self, node: ast.AST, loop: Loop, scope: Scope) -> bool:
        """Whether a line runs in each pass of a loop, under no test."""
        return not any(
            isinstance(parent, ast.If) and within(parent, loop) for _, parent in scope.module.ancestors(node)
        )
