"""Rules about random numbers on the ranks, and about a model's modes: dropout, batch norm, train() and eval()."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.contexts import Pass, Use, quiet
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.passes import run
from lockstep.commands.lint.places import calls_in, collects, evaluation_loops, over_loader, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.after_wrapping import after_wrapping, where
from lockstep.commands.lint.rules.averaged import evaluates_another
from lockstep.commands.lint.rules.by_ignite import never_trains, training_mode
from lockstep.commands.lint.rules.fresh import ON_PURPOSE, fresh_and_tested
from lockstep.commands.lint.several import lightning
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk


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
    """convert_sync_batchnorm of what DistributedDataParallel returned, or of the network that it was given."""
    for name in ("convert_sync_batchnorm", "convert_syncbn_model"):
        for call in program.named.get(name, []):
            if call.args and (after_wrapping(program, call, call.args[0]) or _prepared_above(program, call)):
                yield Hit(where(program, call, call.args[0]))


def _prepared_above(program: Program, call: ast.Call) -> bool:
    """Whether what is converted is what Accelerate's prepare, Fabric's setup or Ignite's auto_model returned above."""
    model = call.args[0]
    source, text = program.owner[call], text_of(model)
    found = source.attributes.get(text, []) + source.names.get(source.scopes[call], {}).get(text, [])
    last = max((b for b in found if _line(b.node) < call.lineno), key=lambda b: _line(b.node), default=None)
    made = last.value if last is not None and last.kind == "value" else None
    if not isinstance(made, ast.Call):
        return False
    if last_name(made.func) == "auto_model":
        return qualified(program, made.func).startswith("ignite.")
    owner = made.func.value if isinstance(made.func, ast.Attribute) else None
    several = owner is not None and last_name(made.func) in ("prepare", "prepare_model", "setup", "setup_module")
    return several and owner is not None and bool(made_by(program, owner, "Accelerator", "Fabric"))


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


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
    yield from training_mode(program)
    if not program.whole or not step_loops(program) or lightning(program):
        return
    text = "\n".join(source.text for source in program.sources)
    if not re.search(
        r"[Dd]ropout|[Bb]atch_?[Nn]orm|torchvision.*models|timm|create_model|get_model|torch\.hub|pretrained|Transformer",
        text,
    ):
        return  # nothing in it changes with the mode
    yield from _said_and_evaluated(program)
    for loop in evaluation_loops(program):
        function = function_of(program.owner[loop], loop)
        without = not _evaluates(program, function, 0) or evaluates_another(program, loop)
        if without and _looks_like_evaluation(program, loop):
            yield Hit(_without_gradients(program, loop) or loop)
    yield from (Hit(node) for node in dict.fromkeys(fresh_and_tested(program)))


def _said_and_evaluated(program: Program) -> Iterator[Hit]:
    """A model that train() was said to last, in a loop over batches that judges it."""
    found = run(program) if program.named.get("train") else None
    hits = {}
    for each in found.passes if found is not None else []:
        judged = [use for use in each.uses if use.modes and all(mode.training and mode.call for mode in use.modes)]
        if not each.backward and judged and over_loader(program, each.loop) and _judges(program, each, judged):
            hits[_without_gradients(program, each.loop) or each.loop] = True
    for node in hits:
        yield Hit(node if isinstance(node, ast.stmt) else statement_of(program.owner[node], node))


def _judges(program: Program, one: Pass, uses: list[Use]) -> bool:
    """Whether a pass without backward is an evaluation, and its function no update of batch norm's statistics."""
    function = function_of(program.owner[one.loop], one.loop)
    name = function.name.lower() if function is not None else ""
    text = text_of(function) if function is not None else program.owner[one.loop].text
    named = re.search(r"eval|test|valid", name)
    if collects(program, one.loop) or (ON_PURPOSE.search(name) and not named):
        return False
    measured = re.search(r"argmax|topk|acc|correct|\.max\(|metric|score|loss", text)
    return bool(measured) and (bool(named) or not any(use.gradients for use in uses))


def _without_gradients(program: Program, loop: ast.AST) -> ast.AST | None:
    """The `with torch.no_grad()` around or in a loop, or the function that is decorated so: eval() belongs above it."""
    outer = list(above(program.owner[loop], loop))
    for each in [*outer, *walk(loop)]:
        if isinstance(each, ast.With) and any(quiet(item.context_expr) for item in each.items):
            return each
    return next((f for f in outer if isinstance(f, Function) and any(map(quiet, f.decorator_list))), None)


def _looks_like_evaluation(program: Program, loop: ast.AST) -> bool:
    """By no_grad around it, or by names: it is not a part of training, a warm-up or a drawing of features."""
    source = program.owner[loop]
    function = function_of(source, loop)
    text = text_of(function) if function else text_of(loop)
    around = [item.context_expr for each in above(source, loop) if isinstance(each, ast.With) for item in each.items]
    text += "".join(map(text_of, [*around, *_decorators(program, function)]))
    sampled = function is not None and re.search(r"mc_|monte|uncert|stochastic", function.name.lower())
    return not (collects(program, loop) or sampled) and (
        "no_grad" in text
        or "inference_mode" in text
        or bool(function and re.search(r"eval|test|valid", function.name.lower()))
    )


def _decorators(program: Program, function: Function | None) -> list[Function]:
    """The local decorators of a function."""
    marks = function.decorator_list if function is not None else []
    found = [definition(program, each.func if isinstance(each, ast.Call) else each) for each in marks]
    return [each for each in found if isinstance(each, Function)]


def _evaluates(program: Program, function: Function | None, depth: int) -> bool:
    """Whether a function, or all that call it, say eval() or train(False)."""
    node: ast.AST = function if function is not None else program.root.tree
    if _mode_calls(program, node, "eval"):
        return True
    for call in _mode_calls(program, node, "train"):
        if (call.args or call.keywords) and callee(program, call) is None:
            return True
    if any(_mode_calls(program, each, "eval") for each in _decorators(program, function)):
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
    yield from never_trains(program)
    known = list(_left_in_evaluation(program))
    yield from known
    for steps, around in step_loops(program).items():
        if _trained_in_evaluation(program, steps):
            continue
        for loop in around:
            found = [
                each
                for each in _mode_calls(program, loop, "eval")
                if not each.args
                and not re.search(
                    r"ema|teacher|criterion|loss|frozen|feature|backbone|critic|disc", text_of(each.func).lower()
                )
            ]
            if known and found[:1] == [known[0].node]:
                continue
            if found and not _mode_calls(program, loop, "train") and not _restored(program, found[0]):
                first = next(iter(loop.body))
                yield Hit(found[0], "", _train_edit(program, found[0], first, loop))
                return


def _left_in_evaluation(program: Program) -> Iterator[Hit]:
    """A model whose parameters an optimizer has, called in a training step after eval() and an evaluation."""
    found = run(program) if program.whole and not lightning(program) else None
    hits = []
    for each in found.passes if found is not None else []:
        if found is None or not each.backward:
            continue
        for use in each.uses:
            if not use.gradients or use.key not in found.trained:
                continue
            for mode in use.modes:
                if mode.call is not None and not mode.training and mode.used and not _restored(program, mode.call):
                    hits.append(mode.call)
    yield from (Hit(call) for call in dict.fromkeys(hits))


def _trained_in_evaluation(program: Program, loop: Loop) -> bool:
    """Whether the function of a step loop calls eval() above it: a frozen network under a new classifier."""
    function = function_of(program.owner[loop], loop)
    modes = _mode_calls(program, function, "eval") if function is not None else []
    return any(function_of(program.owner[each], each) is function and each.lineno < loop.lineno for each in modes)


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
    text = text_of(function) if function else program.root.text
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return ".training" in text or (owner is not None and bool(made_by(program, owner, "deepcopy", "AveragedModel")))
