"""What a process asks of its group before there is one, by the order in which it comes by calls."""

import ast
import re
import sys
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.order import Step, passed
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import given, spread
from lockstep.commands.lint.rules.collectives import collectives
from lockstep.commands.lint.several import wrapped
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of

_STARTERS = {"init_process_group", "init_device_mesh", "fully_shard", "init_distributed"}
_SPAWNERS = {"spawn", "start_processes", "Process", "notebook_launcher"}
# libraries that begin no process group; another one may, whatever its functions are called
_SILENT = sys.stdlib_module_names | {
    *("torchvision", "torchaudio", "torchmetrics", "timm", "numpy", "scipy", "sklearn", "pandas", "PIL", "cv2"),
    *("tqdm", "rich", "click", "typer", "fire", "yaml", "omegaconf", "wandb", "mlflow", "tensorboard", "tensorboardX"),
    *("matplotlib", "einops", "albumentations", "safetensors", "h5py", "psutil", "loguru", "dotenv", "datasets"),
}


def too_early(program: Program) -> Iterator[ast.AST]:
    """What needs the group and is reached, under no condition, before anything that may begin one."""
    if not any(program.named.get(name) for name in ("init_process_group", "init_device_mesh")):
        return
    known = _users(program)
    for start in _starts(program):
        asked: list[Step] = []
        for step in passed(program, start):
            if _may_begin(program, step):
                yield from (each.node for each in asked if _as_sure(each, step))
                break
            if step.node in known and not step.conditions:
                yield step.node
            elif step.node in known:
                asked.append(step)


def _as_sure(asked: Step, begun: Step) -> bool:
    """Whether a group is asked and begun under the same conditions, none of which asks whether it is there."""
    texts = [text_of(each).partition("\n")[0] for each in asked.conditions]
    other = re.search(r"is_initialized|is_available|hasattr|get_rank|rank|exists", " ".join(texts))
    direct = isinstance(begun.node, ast.Call) and last_name(begun.node.func) in _STARTERS
    plain = all(isinstance(each, ast.expr) for each in asked.conditions)
    return direct and plain and asked.conditions == begun.conditions and not other


def _starts(program: Program) -> Iterator[ast.AST]:
    """Where processes begin: the program's top, what is spawned, and what begins the group and is called by nobody."""
    yield program.root.tree
    for target in _targets(program):
        if isinstance(found := definition(program, target), Function):
            yield found
    for init in program.named.get("init_process_group", []):
        function = function_of(program.owner[init], init)
        if function is not None and not sites(program, function) and not function.decorator_list:
            yield function
    top = [each for each in program.root.tree.body if isinstance(each, Function)]
    before = any(_decorated(each, "group", "callback") and _begins(program, each) for each in top)
    entered = [each for each in top if _decorated(each, "command") and _only_options(each)]
    yield from entered if len(entered) == 1 and not before else ()


def _decorated(function: Function, *names: str) -> bool:
    """@cli.command(), @app.command: the command line runs it, after the function of @click.group()."""
    made = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(last_name(each) in names for each in made)


def _only_options(function: Function) -> bool:
    """Whether no decorator may begin the group around a command."""
    plain = ("command", "option", "argument", "pass_context", "pass_obj", "version_option", "no_grad")
    made = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return all(last_name(each) in plain for each in made)


@remembered
def _targets(program: Program) -> set[ast.expr]:
    """The functions that other processes are started with, as they are named there."""
    found = set()
    for call in [call for name in _SPAWNERS for call in program.named.get(name, [])]:
        target = next((each.value for each in call.keywords if each.arg in ("target", "fn")), None)
        if target is None and call.args and last_name(call.func) != "Process":
            target = call.args[0]
        if target is not None:
            found.add(target)
    return found


def _users(program: Program) -> set[ast.AST]:
    found: set[ast.AST] = {call for call in wrapped(program) if given(program, call, "process_group") is None}
    found |= {call for call in collectives(program) if qualified(program, call.func).startswith("torch.distributed.")}
    for name in ("get_rank", "get_world_size", "new_group"):
        found |= {
            call for call in program.named.get(name, []) if qualified(program, call.func) == f"torch.distributed.{name}"
        }
    for call in program.named.get("field", []):  # field(default_factory=dist.get_rank), which each object calls
        found |= {each for each in call.keywords if each.arg == "default_factory" and _asks(program, each.value)}
    for call in program.named.get("DistributedSampler", []):
        told = all(given(program, call, name, n) for name, n in (("num_replicas", 1), ("rank", 2)))
        if qualified(program, call.func).startswith("torch.utils.data.") and not told and not spread(call):
            found.add(call)
    return found


def _asks(program: Program, node: ast.expr) -> bool:
    return qualified(program, node) in ("torch.distributed.get_rank", "torch.distributed.get_world_size")


def _may_begin(program: Program, step: Step) -> bool:
    """Whether a group may be there after this step: begun here, by a library, or by something local that is named."""
    node = step.node
    if not isinstance(node, ast.Call):
        if node in _targets(program):
            return False
        found = definition(program, node)
        if found is not None:
            return _begins(program, found)
        return isinstance(node, ast.Attribute) and _some_method_begins(program, node)
    if last_name(node.func) in _STARTERS:
        return True
    if callee(program, node) is not None or definition(program, node.func) is not None:
        return False  # entered
    name = qualified(program, node.func)
    top = name.partition(".")[0]
    if top == "torch":
        return bool(re.match(r"torch\.distributed\.(init|launch|elastic|rpc)", name))
    if top in _SILENT:
        return bool(re.search(r"init_dist|distributed_init|setup_dist", name))
    if "." in name:
        return True
    if not name:
        return _some_method_begins(program, node.func) or bool(
            re.search(r"init(?!ial_|_weights)|setup|launch|distribut|prepare|start", last_name(node.func).strip("_"))
            and last_name(node.func) != "__init__"
        )
    return name in ("exec", "eval", "__import__") or bool(re.search(r"init|setup|launch|dist", name))


def _some_method_begins(program: Program, node: ast.AST) -> bool:
    return any(_begins(program, each) for each in program.methods.get(last_name(node), []))


@remembered
def _begins(program: Program, node: Function | ast.ClassDef) -> bool:
    return any(isinstance(each, ast.Call) and last_name(each.func) in _STARTERS for each in inside(program, node))
