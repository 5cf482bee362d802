"""Rules about random numbers on the ranks, and about a model's modes: dropout, batch norm, train() and eval()."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, sites
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import made_by, origins
from lockstep.commands.lint.places import calls_in, evaluation_loops, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_rank, per_rank
from lockstep.commands.lint.roles import constant, distributed, given, library, lightning, wrapped
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.source import Function, function_of

_SEEDS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed_all", "set_random_seed")


def _seeds(program: Program) -> list[ast.Call]:
    """The calls that seed torch's generator of this process."""
    found = []
    for name in _SEEDS:
        for call in program.named.get(name, []):
            text = qualified(program, call.func)
            if name != "manual_seed" or text in (
                "torch.manual_seed",
                "torch.random.manual_seed",
                "torch.cuda.manual_seed",
            ):
                found.append(call)
    return found


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
    drops = [
        call
        for name in ("Dropout", "Dropout2d", "dropout", "DropPath", "dropout2d", "AlphaDropout")
        for call in program.named.get(name, [])
    ]
    drops = [each for each in drops if not definition(program, each.func) and not _never_drops(program, each)]
    seeds = _seeds(program)
    if not drops or not seeds or not wrapped(program) or library(program, "accelerate", "lightning"):
        return
    if any(call.args and on_rank(program, call.args[0]) for call in [*seeds, *program.named.get("seed", [])]):
        return
    if any(each.arg in ("device_specific", "workers") for call in seeds for each in call.keywords):
        return
    if any(re.search(r"torch\.seed\(\)|set_rng_state|fork_rng", source.text) for source in program.sources):
        return
    known = [call for call in seeds if per_rank(program, call) and definition(program, call.func) is None]
    known = [call for call in known if "worker" not in _function_name(program, call)]
    if known:
        yield Hit(known[-1])


def _function_name(program: Program, call: ast.Call) -> str:
    function = function_of(program.owner[call], call)
    return function.name if function is not None else ""


def _never_drops(program: Program, call: ast.Call) -> bool:
    share = given(
        program, call, "p", 1 if qualified(program, call.func).endswith(("functional.dropout", "F.dropout")) else 0
    )
    factors = [share.left, share.right] if isinstance(share, ast.BinOp) and isinstance(share.op, ast.Mult) else [share]
    return any(constant(program, each) in (0, 0.0) for each in factors)


@rule(
    "LS212",
    "seeds-unset",
    "ranks draw different splits or weights",
    result="each rank cuts the set elsewhere: samples of one rank's test part are trained on by another; weights "
    "differ without DDP",
    why="no seed is set, so each process's generator starts anywhere",
    mend="random_split(dataset, sizes, generator=torch.Generator().manual_seed(0))",
)
def seeds_unset(program: Program) -> Iterator[Hit]:
    """random_split in each rank of a program that never seeds; weights without a broadcast."""
    if (
        not program.whole
        or not distributed(program)
        or lightning(program)
        or any("seed" in source.text for source in program.sources)
    ):
        return
    sharded = {name for name in ("DistributedSampler", "Accelerator") if program.named.get(name)}
    for call in program.named.get("random_split", []):
        if sharded and per_rank(program, call) and given(program, call, "generator", 2) is None:
            yield Hit(call)
    for call in program.named.get("Subset", []) if sharded else []:
        chosen = given(program, call, "indices", 1)
        if chosen is not None and per_rank(program, call) and depends(program, chosen, _is_permutation):
            yield Hit(call)
    if wrapped(program):
        return
    text = "\n".join(source.text for source in program.sources)
    if library(program, "horovod.torch") and not re.search(r"broadcast_parameters|load_state_dict|elastic", text):
        yield from (
            Hit(call, "no broadcast of the parameters") for call in program.named.get("DistributedOptimizer", [])
        )
    by_hand = [call for call in program.named.get("all_reduce", []) if ".grad" in ast.unparse(call)]
    if (
        by_hand
        and program.named.get("init_process_group")
        and not re.search(r"broadcast|load_state_dict|fully_shard|FSDP", text)
    ):
        yield Hit(by_hand[0], "gradients averaged by hand, weights never made equal")


def _is_permutation(node: ast.AST) -> bool:
    """A permutation that is drawn from a generator of the process."""
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) in ("randperm", "permutation")
        and not any(each.arg == "generator" for each in node.keywords)
    )


@rule(
    "LS213",
    "converted-after-wrapping",
    "batch norm is converted after the model was wrapped",
    result="new parameters, as apex's conversion makes, are averaged by nobody; torch's hands the old ones on, past "
    "DDP's check of the new layers",
    why="the conversion makes new layers; DDP has already taken the old ones' parameters",
    mend="model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\nmodel = DistributedDataParallel(model)",
)
def converted_after_wrapping(program: Program) -> Iterator[Hit]:
    """convert_sync_batchnorm of what DistributedDataParallel returned."""
    for name in ("convert_sync_batchnorm", "convert_syncbn_model"):
        for call in program.named.get(name, []):
            if call.args and any(each in wrapped(program) for each in origins(program, call.args[0])):
                yield Hit(call)


def _mode_calls(program: Program, node: ast.AST, name: str) -> list[ast.Call]:
    """The calls of model.eval() or model.train() within a statement and what it calls."""
    calls = calls_in(program, node, name)
    return [each for each in calls if isinstance(each.func, ast.Attribute) and not qualified(program, each.func)]


@rule(
    "LS214",
    "eval-missing",
    "the model is evaluated in training mode",
    result="dropout is active and batch norm takes the test batch's own statistics: the accuracy is too low, and "
    "depends on the batch size",
    why="model.eval() is never called before the test set is passed through",
    mend="model.eval()\nwith torch.no_grad():\n    ...\nmodel.train()",
)
def eval_missing(program: Program) -> Iterator[Hit]:
    """An evaluation loop of a program that trains, and no eval() in its function or above."""
    if not program.whole or not step_loops(program) or lightning(program):
        return
    text = "\n".join(source.text for source in program.sources)
    if not re.search(
        r"[Dd]ropout|[Bb]atch_?[Nn]orm|torchvision.*models|timm|create_model|get_model|torch\.hub|pretrained|Transformer",
        text,
    ):
        return  # nothing in it changes with the mode
    for loop in evaluation_loops(program):
        function = function_of(program.owner[loop], loop)
        if not _evaluates(program, function, 0) and _looks_like_evaluation(program, loop):
            yield Hit(loop)


def _looks_like_evaluation(program: Program, loop: ast.AST) -> bool:
    """By no_grad around it, or by names: it is not a part of training, a warm-up or a drawing of features."""
    source = program.owner[loop]
    function = function_of(source, loop)
    text = ast.unparse(function) if function else ast.unparse(loop)
    return (
        "no_grad" in text
        or "inference_mode" in text
        or bool(function and re.search(r"eval|test|valid", function.name.lower()))
    )


def _evaluates(program: Program, function: Function | None, depth: int) -> bool:
    """Whether a function, or all that call it, say eval() or train(False)."""
    node: ast.AST = function if function is not None else program.root.tree
    if _mode_calls(program, node, "eval"):
        return True
    for call in _mode_calls(program, node, "train"):
        if call.args or call.keywords:
            return True
    calls = [site.call for site in sites(program, function)] if function is not None and depth < 5 else []
    return any(_evaluates(program, function_of(program.owner[call], call), depth + 1) for call in calls)


@rule(
    "LS215",
    "train-forgotten",
    "after the first evaluation the model stays in evaluation mode",
    result="from epoch 2 on there is no dropout, and batch norm's running statistics stand still at those of epoch 1",
    why="eval() is called in each epoch, and train() in none",
    mend="for epoch in range(epochs):\n    model.train()",
)
def train_forgotten(program: Program) -> Iterator[Hit]:
    """eval() within the loop over epochs, train() nowhere in it."""
    for around in step_loops(program).values():
        for loop in around:
            found = [
                each
                for each in _mode_calls(program, loop, "eval")
                if not each.args
                and not re.search(
                    r"ema|teacher|criterion|loss|frozen|feature|backbone|critic|disc", ast.unparse(each.func).lower()
                )
            ]
            if found and not _mode_calls(program, loop, "train") and not _restored(program, found[0]):
                first = next(iter(loop.body))
                yield Hit(found[0], "", _train_edit(program, found[0], first, loop))
                return


def _train_edit(program: Program, call: ast.Call, first: ast.stmt, loop: ast.AST) -> tuple[Edit, ...]:
    """`model.train()` as the loop's first statement, where the model has one name there and in the call."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    same = function_of(program.owner[call], call) is function_of(program.owner[loop], loop)
    if not isinstance(owner, ast.Name) or not same or program.owner[call] is not program.owner[loop]:
        return ()
    return (insert(first.lineno, first.col_offset, f"{owner.id}.train()\n{' ' * first.col_offset}"),)


def _restored(program: Program, call: ast.Call) -> bool:
    """Whether the model is put back by other means: mode = model.training; a copy is evaluated."""
    function = function_of(program.owner[call], call)
    text = ast.unparse(function) if function else program.root.text
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return ".training" in text or (owner is not None and bool(made_by(program, owner, "deepcopy", "AveragedModel")))
