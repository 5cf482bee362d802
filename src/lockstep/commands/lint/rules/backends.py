"""The rule about the backend: NCCL where nothing is on a GPU, or for a tensor that is not."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.parts import attribute_bindings, turns
from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import constant, given, spread
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.both_ways import both_ways
from lockstep.commands.lint.rules.collectives import collectives
from lockstep.commands.lint.several import library, wrapped
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Function, Source
from lockstep.commands.lint.tree import text_of, walk

_SEEN = re.compile(r"cuda|accelerator|\bgpu|npu\b|xpu\b|device_ids|set_device", re.IGNORECASE)
_AIDS = {"manual_seed", "manual_seed_all", "is_available", "empty_cache", "get_rng_state_all", "set_rng_state_all"}
_MAKERS = {
    *("torch.tensor", "torch.zeros", "torch.ones", "torch.empty", "torch.full", "torch.arange", "torch.rand"),
    *("torch.randn", "torch.randint", "torch.from_numpy", "torch.Tensor", "torch.FloatTensor", "torch.LongTensor"),
}
_JOINING = {"torch.stack", "torch.cat", "torch.concat", "torch.hstack", "torch.vstack"}
_STAYING = {"float", "double", "long", "int", "half", "clone", "detach", "contiguous", "sum", "mean", "view", "reshape"}


@rule(
    "LS316",
    "nccl-on-cpu",
    "the backend is NCCL, and everything is on the CPU",
    result="init_process_group or the first collective fails: NCCL reduces tensors of GPUs alone",
    why="nothing in the program asks for a GPU",
    mend='dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
)
def nccl_on_cpu(program: Program) -> Iterator[Hit]:
    """backend nccl in a program that puts nothing on a GPU, or that reduces a tensor that it made on the CPU."""
    yield from _of_lightning(program)
    if library(program, "accelerate", "lightning", "deepspeed", "apex", "ignite") or len(program.sources) > 20:
        return
    begun = [
        call
        for call in program.named.get("init_process_group", [])
        if constant(program, given(program, call, "backend", 0)) == "nccl"
    ]
    if not begun or len(begun) < len(program.named["init_process_group"]):
        return
    if (_hides(program) or not any(_sees(program, source) for source in program.sources)) and _knows_all(program):
        yield from (Hit(call) for call in begun)
    elif both_ways(program) and not any(_asked(program, call) for call in begun):
        yield from (Hit(call, "the program also runs where there is no GPU") for call in begun)
    else:
        yield from (Hit(call, "the tensor was made on the CPU") for call in _of_cpu(program))


def _asked(program: Program, call: ast.Call) -> bool:
    """Whether a condition above, or one that leaves, asks for a GPU, or an error is caught."""
    source = program.owner[call]
    if any(isinstance(each, ast.Try) and each.handlers for each in above(source, call)):
        return True
    function = function_of(source, call)
    around = [each.test for each in above(source, call) if isinstance(each, ast.If)]
    earlier = [each for each in walk(function or source.tree) if isinstance(each, ast.If | ast.Assert)]
    leaving = [each.test for each in earlier if isinstance(each, ast.Assert) or _leaves(each.body[-1])]
    return any(re.search("cuda|gpu|device|accel", text_of(each)) for each in [*around, *leaving])


def _leaves(node: ast.stmt) -> bool:
    ends = isinstance(node, ast.Expr) and re.match(r"(sys\.)?exit\(", text_of(node)) is not None
    return ends or isinstance(node, ast.Return | ast.Raise)


def _of_lightning(program: Program) -> Iterator[Hit]:
    """Trainer(accelerator="cpu", strategy=DDPStrategy(process_group_backend="nccl"))"""
    for call in [*program.named.get("Trainer", []), *program.named.get("Fabric", [])]:
        strategy = given(program, call, "strategy")
        if constant(program, given(program, call, "accelerator")) == "cpu" and strategy is not None:
            for made in origins(program, strategy):
                backend = given(program, made, "process_group_backend") if isinstance(made, ast.Call) else None
                if backend is not None and constant(program, backend) == "nccl":
                    yield Hit(backend)


def _hides(program: Program) -> bool:
    """CUDA_VISIBLE_DEVICES = "" in the program itself."""
    return any(
        isinstance(each.value, ast.Constant)
        and each.value.value in ("", "-1")
        and not any(isinstance(outer, ast.If) for outer in above(source, each.node))
        for source in program.sources
        for each in source.attributes.get("os.environ['CUDA_VISIBLE_DEVICES']", [])
    )


def _sees(program: Program, source: Source) -> bool:
    """Whether a file may put something on a GPU: by a name, a short text, or a device that can't be told."""
    for node in source.of(ast.Constant, ast.Name, ast.arg, ast.keyword, ast.Attribute, ast.alias, ast.Call):
        parent = source.parents.get(node)
        match node:
            case ast.Constant(value=str(text)):
                prose = isinstance(parent, ast.Expr) or (isinstance(parent, ast.keyword) and parent.arg == "help")
                if _SEEN.search(text) and " " not in text and not prose and text != "CUDA_VISIBLE_DEVICES":
                    return True
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)) if _SEEN.search(name):
                empty = isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and not node.value.value
                if not empty:
                    return True
            case ast.Attribute(attr=name) if _SEEN.search(name):
                if not (isinstance(parent, ast.Attribute) and parent.attr in _AIDS):
                    return True
            case ast.alias(name=name) if re.search(r"cuda|accelerator", name):
                return True
            case ast.Call(func=ast.Attribute(attr="to"), args=[first, *_]) if not _on_cpu(program, first):
                return True
            case ast.keyword(arg="device" | "map_location", value=value) if not _on_cpu(program, value):
                return True
    return False


def _on_cpu(program: Program, node: ast.expr) -> bool:
    """Whether what a tensor is moved to is the CPU, or no device: a type, another tensor's."""
    for made in origins(program, node):
        place: object = ...
        if isinstance(made, ast.Constant):
            place = made.value
        elif isinstance(made, ast.Call) and last_name(made.func) == "device" and made.args:
            place = constant(program, made.args[0])
        elif isinstance(made, ast.Attribute) and (
            made.attr == "device" or qualified(program, made).startswith("torch.")
        ):
            place = "cpu"
        if place not in ("cpu", None):
            return False
    return True


def _knows_all(program: Program) -> bool:
    """Whether the program itself makes a model and its data: nothing that others give could hold a device."""
    return bool(wrapped(program)) or bool(program.named.get("all_reduce"))


def _of_cpu(program: Program) -> Iterator[ast.Call]:
    """The reductions of a tensor that torch made without a device, while tensors are made on the CPU."""
    if any(program.named.get(name) for name in ("set_default_device", "set_default_tensor_type", "new_group")):
        return
    if any(_sets_device(node) for source in program.sources for node in source.of(ast.With)):
        return
    for call in collectives(program):
        name = qualified(program, call.func)
        tensor = given(program, call, "tensor", int(last_name(call.func) == "all_gather"))
        grouped = given(program, call, "group") is not None
        if (
            re.fullmatch(r"torch\.distributed\.(all_reduce|broadcast|reduce|all_gather)", name)
            and tensor is not None
            and not grouped
            and _made_on_cpu(program, tensor)
        ):
            yield call


def _sets_device(node: ast.With) -> bool:
    """`with torch.device("cuda"):`"""
    calls = [each.context_expr for each in node.items]
    return any(isinstance(each, ast.Call) and last_name(each.func) == "device" for each in calls)


def _listed(program: Program, node: ast.expr) -> list[ast.expr]:
    """What a list holds that is written out, made by a comprehension, or appended to; nothing where that isn't all."""
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return list(parts)
        case ast.ListComp(elt=part):
            return [part]
        case ast.Name(id=name):
            found = reaching(program, node, bindings(program, node, name))
            if [type(each.value) for each in found] != [ast.List]:
                return []
            home, listed = program.owner[node], found[0].value
            names = [each for each in own_nodes(program, node) if isinstance(each, ast.Name) and each.id == name]
            above_it = [each for each in names if isinstance(each.ctx, ast.Load) and each.lineno < node.lineno]
            uses = [home.parents[home.parents[each]] for each in above_it]
            added = [each for each in uses if isinstance(each, ast.Call) and last_name(each.func) == "append"]
            whole = isinstance(listed, ast.List) and len(added) == len(uses)
            return [*listed.elts, *(each.args[0] for each in added)] if whole and isinstance(listed, ast.List) else []
    return []


@remembered
def _made_on_cpu(program: Program, node: ast.expr) -> bool:
    """Whether a tensor is torch.tensor(...) and the like without a device; a parameter, by any call that gives it."""
    match node:
        case ast.Call(func=ast.Attribute(attr="cpu"), args=[]):
            return True
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[], keywords=[]) if name in _STAYING:
            return _made_on_cpu(program, owner)
        case ast.BinOp(left=left, right=ast.Constant() | ast.Call(func=ast.Name(id="len" | "float" | "int"))):
            return _made_on_cpu(program, left)
        case ast.Call(args=[first, *_]) if qualified(program, node.func) in _JOINING:
            parts = _listed(program, first)
            return bool(parts) and all(_made_on_cpu(program, each) for each in parts)
        case ast.Call():
            places = [each.value for each in node.keywords if each.arg == "device"]
            placed = spread(node) or not all(constant(program, each) == "cpu" for each in places)
            maker = callee(program, node)
            back = returns(program, maker) if maker is not None and maker.name != "__init__" else []
            if back:
                return all(each is not None and _made_on_cpu(program, each) for each in back)
            listed = qualified(program, node.func) == "torch.as_tensor" and isinstance(
                next(iter(node.args), None), ast.List
            )
            return (listed or qualified(program, node.func) in _MAKERS) and not placed
        case ast.Attribute(attr=name):
            set_to = [each for each in attribute_bindings(program, name) if each.kind != "aug"]
            inner = [each.value if each.kind == "value" and not each.path else None for each in set_to]
            return bool(inner) and all(isinstance(each, ast.Call) and _made_on_cpu(program, each) for each in inner)
        case ast.Name(id=name):
            bound = reaching(program, node, [each for each in bindings(program, node, name) if each.kind != "aug"])
            values = [each.value for each in bound if each.kind == "value" and not each.path]
            if [each.kind for each in bound] == ["param"]:
                function = program.owner[bound[0].node].scopes[bound[0].node]
                known = sites(program, function) if isinstance(function, Function) else []
                given_ones = [argument(site, name) for site in known]
                return any(each is not None and _made_on_cpu(program, each) for each in given_ones)
            if [each.kind for each in bound] == ["item"] and bound[0].value is not None:
                taken = list(turns(bound[0].value, bound[0].path, lambda each: origins(program, each)))
                return bool(taken) and all(
                    isinstance(e, ast.expr) and not path and _made_on_cpu(program, e) for e, path in taken
                )
            known_all = len(values) == len(bound) > 0
            return known_all and all(
                isinstance(each, ast.Call | ast.Name | ast.BinOp) and _made_on_cpu(program, each) for each in values
            )
    return False
