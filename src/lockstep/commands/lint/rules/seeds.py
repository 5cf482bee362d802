"""Rules about random numbers on the ranks: what has to be equal on them, and what has to differ."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.guards import per_rank
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.seeding import by_rank, handed_on, torch_seeds, used
from lockstep.commands.lint.several import distributed, library, wrapped


@rule(
    "LS211",
    "equal-dropout",
    "all ranks draw the same dropout masks",
    result="the k-th samples of all ranks lose the same units: a step sees N times fewer different masks",
    why="the seed is the same on all ranks, and stays so after the weights are drawn",
    mend="torch.manual_seed(seed)         # the same initial weights\nmodel = Net()\ntorch.manual_seed(seed + rank)  # "
    "other masks",
)
def equal_dropout(program: Program) -> Iterator[Hit]:
    """Dropout in a distributed program that seeds, and never by the rank."""
    seeds = torch_seeds(program)
    several = wrapped(program) or library(program, "horovod") or distributed(program)
    if not seeds or not several or not any(used(program, call) for call in _drops(program)):
        return
    if handed_on(program) or any(by_rank(program, call) for call in [*seeds, *program.named.get("seed", [])]):
        return
    if any(each.arg == "device_specific" for call in seeds for each in call.keywords):
        return
    if any(re.search(r"torch\.seed\(\)|set_rng_state|fork_rng", source.text) for source in program.sources):
        return
    known = [call for call in seeds if per_rank(program, call) and definition(program, call.func) is None]
    known = [call for call in known if "worker" not in _function_name(program, call)]
    if known:
        yield Hit(known[-1])


_LAYERS = (
    *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "dropout", "dropout2d"),
    *("DropPath", "StochasticDepth", "stochastic_depth", "drop_path", "DropBlock2d", "DropBlock3d"),
)
_INSIDE = ("LSTM", "GRU", "RNN", "MultiheadAttention")
_BY_DEFAULT = ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer")
_SHARES = ("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "dropout", "stochastic_depth_prob")
_DROPPING = re.compile(
    r"^(alexnet|vgg\d|mobilenet|efficientnet|convnext|swin|googlenet|inception|squeezenet|maxvit|mnasnet)"
)


def _drops(program: Program) -> Iterator[ast.Call]:
    """The calls that make, or run, something that draws masks: layers, torch's recurrent ones, torchvision's models."""
    for name in _LAYERS:
        for call in program.named.get(name, []):
            own = isinstance(call.func, ast.Attribute) and not qualified(program, call.func)  # self.dropout(x)
            if not own and not definition(program, call.func) and not _never_drops(program, call):
                yield call
    for name in [*_INSIDE, *_BY_DEFAULT]:
        for call in program.named.get(name, []):
            share = given(program, call, "dropout")
            asked = share is not None if name in _INSIDE else True
            if (
                asked
                and qualified(program, call.func).startswith("torch.")
                and constant(program, share) not in (0, 0.0)
            ):
                yield call
    for call in program.calls:
        if not definition(program, call.func) and _model_drops(program, call):
            yield call
    yield from _by_hand(program)


def _model_drops(program: Program, call: ast.Call) -> bool:
    """Whether a call makes a library's model that drops units: by its shares, or torchvision's by default."""
    name = qualified(program, call.func)
    if not re.search(r"^torchvision\.models\.|^timm\.", name):
        return False
    shares = [constant(program, share) for each in _SHARES if (share := given(program, call, each)) is not None]
    if any(isinstance(each, float) and each > 0 for each in shares):
        return True
    kind = name.rpartition(".")[2] if name.startswith("torchvision.") else ""
    if kind in ("get_model", "list_models"):
        kind = str(constant(program, given(program, call, "name", 0)))
    return bool(_DROPPING.search(kind)) and not any(each in (0, 0.0) for each in shares)


def _by_hand(program: Program) -> Iterator[ast.Call]:
    """A mask that a module's forward draws itself; a layer that is named in a table or handed on, to be made later."""
    for name in ("bernoulli_", "bernoulli"):
        for call in program.named.get(name, []):
            if _function_name(program, call) in ("forward", "drop_path", "dropout"):
                yield call
    for call in [*program.named.get("Sequential", []), *program.named.get("append", [])]:
        for part in [call, *call.args]:
            made = part.func if isinstance(part, ast.Call) else None
            for one in origins(program, made) if isinstance(made, ast.Subscript) else []:
                if qualified(program, one).startswith("torch.nn.") and last_name(one) in _LAYERS:
                    yield call


def _function_name(program: Program, call: ast.Call) -> str:
    function = function_of(program.owner[call], call)
    return function.name if function is not None else ""


def _never_drops(program: Program, call: ast.Call) -> bool:
    share = given(
        program, call, "p", 1 if qualified(program, call.func).endswith(("functional.dropout", "F.dropout")) else 0
    )
    factors = [share.left, share.right] if isinstance(share, ast.BinOp) and isinstance(share.op, ast.Mult) else [share]
    return any(constant(program, each) in (0, 0.0) for each in factors)
