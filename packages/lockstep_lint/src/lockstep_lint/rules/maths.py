"""LS2: the numbers: losses, gradients, metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.facts.modules import CONFIG, Scope
from lockstep_lint.facts.training import REDUCES, Facts, Loader, StepLoop, sums_of
from lockstep_lint.facts.tree import argument, keyword, last_name, literal, receiver, walk_calls, within, words
from lockstep_lint.rules import Places, rule

OPTIMIZER = re.compile(r"optim|^opt|opt$|scaler|^o$|solver|trainer", re.I)
MODES = (  # calls that make a model with dropout or batch norm
    r"^(Alpha|Feature)?Dropout\d?d?$|BatchNorm|^dropout$|DropPath|create_model|^(wide_)?res(net|next)\w*$"
    r"|^(vgg|densenet|mobilenet|efficientnet|vit|swin|regnet|googlenet|inception|shufflenet)_?\w*\d\w*$"
)
COPIES = frozenset(["clone", "tensor", "as_tensor", "deepcopy"])


@dataclass(frozen=True)
class Accumulation:
    """A loop that updates the weights in each k-th pass only."""

    loop: StepLoop
    every: ast.expr  # k
    test: ast.expr  # whose truth means an update
    place: ast.AST  # the `if`, or the argument of a call that updates


def accumulations(facts: Facts) -> Iterator[Accumulation]:
    """The training loops that accumulate gradients over several passes."""
    for loop in facts.step_loops:
        for node in ast.walk(loop.node):
            if isinstance(node, ast.If) and any(updates(each) for each in walk_calls(node)):
                test = node.test
            elif isinstance(node, ast.keyword) and node.arg in ("update_grad", "need_update"):
                test = node.value
            else:
                continue
            for value in facts.sources(test, loop.scope)[:8]:
                counts = [n for n in ast.walk(value.expr) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
                every = counts[0].right if counts else None
                if isinstance(every, (ast.Name, ast.Attribute, ast.Constant)):
                    if not within(loop.backward, node) and not _changed_each_pass(facts, loop, node):
                        yield Accumulation(loop, every, value.expr, node)
                    break


def updates(call: ast.Call) -> bool:
    """Whether a call updates the weights."""
    return last_name(call) == "step" and OPTIMIZER.search(last_name(receiver(call))) is not None


def _changed_each_pass(facts: Facts, loop: StepLoop, node: ast.AST) -> bool:
    """Whether the weights or the gradients are changed in each pass all the same."""
    return any(
        (updates(call) or last_name(call) == "zero_grad")
        and not within(call, node)
        and facts.always_in(call, loop.node, loop.scope)
        for call in walk_calls(loop.node)
    )


@rule("LS201", "loss-not-divided")
def loss_not_divided(facts: Facts) -> Places:
    """The loss is not divided by the number of accumulated batches.

    Gradients are k times as large: with 4 batches an SGD step goes 4 times as far, as if the learning rate were 4 times
    as large.

    backward() adds up gradients, and each batch's loss is a mean over its own samples. Adam's steps do not depend on
    the size of the gradients: a program that knows no other optimizer is left alone.

    Wrong:
        loss_function(model(x), y).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    Right:
        (loss_function(model(x), y) / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    """
    sums = r"""reduction\s*=\s*["']sum|size_average\s*=\s*False|["']--reduction|loss\.sum\("""
    if "deepspeed" in facts.kinds or facts.says(sums):
        return
    if facts.says("Adam|LAMB|Lion|Adafactor") and not facts.says(
        r"""(?i)\bsgd['"(,]|optim\.sgd|import .*\bsgd\b|create_optimizer"""
    ):
        return  # its steps do not depend on the size of the gradients
    for each in accumulations(facts):
        scope = each.loop.scope
        if not isinstance(each.place, ast.If) or facts.constants(each.every, scope) in ({1}, {1, None}):
            continue
        computed = [v.expr for v in facts.sources(each.every, scope) if isinstance(v.expr, (ast.Call, ast.BinOp))]
        if all(last_name(expr) == "int" for expr in computed) and not _divided(facts, each):
            yield each.loop.backward, each.loop.backward_scope, f"every {ast.unparse(each.every)} batches"


def _divided(facts: Facts, each: Accumulation) -> bool:
    """Whether something divides the loss, the gradients or the rate, or may."""
    for call, _ in facts.calls("Accelerator"):
        if keyword(call, "gradient_accumulation_steps") or keyword(call, "gradient_accumulation_plugin"):
            return True
    factor = words(each.every) - CONFIG - {"self"}
    for scope in {each.loop.scope, each.loop.backward_scope}:
        for node in ast.walk(scope.node):
            match node:
                case ast.BinOp(left=left, op=ast.Div() | ast.Mult() as op, right=right):
                    pass
                case ast.AugAssign(target=left, op=ast.Div() | ast.Mult() as op, value=right):
                    pass
                case _:
                    continue
            if factor & words(left, right) or literal(right) == literal(each.every) is not None:
                return True
            said = " ".join(words(left))
            if isinstance(op, ast.Div) and re.search("loss|grad", said) and not isinstance(right, ast.Call):
                return True
    return False


@rule("LS204", "loss-of-one-rank")
def loss_of_one_rank(facts: Facts) -> Places:
    """The training loss of one rank is taken for that of all.

    Ranks decide differently: they get different learning rates, or one stops while the others wait for it. And a rank's
    sum divided by the length of the whole set, or by N, is only 1/N of the mean.

    Each rank adds up its own shard, and nothing adds up the ranks' sums. A mean that is only printed is left alone.

    Wrong:
        loss = train_one_epoch(model, loader)
        scheduler.step(loss)
    Right:
        loss = torch.tensor(train_one_epoch(model, loader))
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        scheduler.step(loss.item())
    """
    for loop in facts.step_loops if facts.several else ():
        scope, sums = loop.scope, sums_of(loop.node)
        loaders, values = facts.loaders_of(loop.node, scope)
        if not any(facts.shares(loader, values) for loader in loaders):
            continue
        if any(REDUCES.search(name) for name in facts.names_called(loop.node, scope, 1)):
            continue
        yield from _decided(facts, scope, sums)
        if any(REDUCES.search(name) for name in facts.names_called(scope.node, scope, 1)):
            continue
        yield from _over_whole(facts, loop, loaders, sums)
        if any(words(value) & sums for value in scope.returns):
            over = words(getattr(loop.node, "iter", None))
            for site in facts.sites.get(scope, []):
                given = [each for name in scope.params if name in over and (each := site.argument(scope, name))]
                values = [value for each in given for value in facts.iterated(each, site.scope)] or values
                if any(each and facts.shares(each, values) for each in map(facts.loader, values)):
                    yield from _decided(facts, site.scope, facts.results(site.call, site.scope))


def _over_whole(facts: Facts, loop: StepLoop, loaders: list[Loader], sums: frozenset[str]) -> Places:
    """Divisions of a rank's sum by the length of the whole data set, or by the number of ranks."""
    sets, names = {last_name(loader.dataset) for loader in loaders} | {"dataset"}, facts.derived(sums, loop.scope)
    for node in ast.walk(loop.scope.node):
        match node:
            case (
                ast.BinOp(left=left, op=ast.Div(), right=right) | ast.AugAssign(target=left, op=ast.Div(), value=right)
            ):
                pass
            case _:
                continue
        by = right.args[0] if isinstance(right, ast.Call) and last_name(right) == "len" and right.args else right
        if names & words(left) and last_name(by) in sets | {"world_size", "num_processes", "get_world_size"}:
            yield node, loop.scope, f"a rank's sum divided by {ast.unparse(right)}"


def _decided(facts: Facts, scope: Scope, sums: frozenset[str]) -> Places:
    """Places where one of some names decides: a schedule, or an early stop."""
    names = facts.derived(sums, scope)
    if any(REDUCES.search(last_name(call)) and words(call) & names for call in scope.calls):
        return
    for call in scope.calls:
        if not call.args or not names & words(call.args[0]):
            continue
        said, owner = last_name(call), last_name(receiver(call))
        if said == "step" and re.search("sched|plateau", owner, re.I):
            yield call, scope, "the learning rate"
        elif re.search("early_?stop", f"{said} {owner}", re.I):
            yield call, scope, "early stopping"


@rule("LS206", "reduced-result-dropped")
def reduced_result_dropped(facts: Facts) -> Places:
    """The reduced value is dropped.

    What is printed, logged or compared is this rank's own number, as if nothing had been reduced.

    The call returns the reduced value and leaves its argument unchanged, or it changes a copy that nobody keeps.

    Wrong:
        hvd.allreduce(loss)
        print(loss.item())
    Right:
        loss = hvd.allreduce(loss)
        print(loss.item())
    """
    for name, calls in facts.by_name.items():
        for call, scope in calls if REDUCES.search(name) else ():
            if not isinstance(scope.module.parents.get(call), ast.Expr):
                continue
            if not facts.resolve(call.func, scope) and _returns_reduced(facts, call, scope):
                yield call, scope, ""


def _returns_reduced(facts: Facts, call: ast.Call, scope: Scope) -> bool:
    """Whether a library's call leaves its argument alone, or is given one that nobody else holds."""
    name, full, given = last_name(call), facts.qualified(call, scope), argument(call, 0, "tensor")
    if given is None or isinstance(given, ast.Constant):
        return False
    if full.startswith(("horovod", "hvd.")) and name in ("allreduce", "allgather"):
        owner = scope.lookup(given.id) if isinstance(given, ast.Name) else None
        bindings = owner.bindings.get(given.id, []) if owner and isinstance(given, ast.Name) else []
        made = {last_name(value.expr) for value in facts.sources(given, scope) if isinstance(value.expr, ast.Call)}
        constant = bool(made & {"tensor", "ones", "zeros"}) and not any(each.kind == "augmented" for each in bindings)
        return not constant  # a constant is sent only to wait for each other
    if last_name(receiver(call)) in ("accelerator", "fabric"):
        return name in ("reduce", "gather", "gather_for_metrics")
    if name in ("all_reduce", "reduce") and full.startswith(("torch.distributed.", "dist.")):
        said = f"{scope.name} {scope.module.path.stem} {' '.join(facts.names_called(scope.node, scope, 0))}"
        lost = isinstance(given, ast.BinOp) or (isinstance(given, ast.Call) and last_name(given) in COPIES)
        return lost and not re.search("time|bench|warm|profile", said)
    return False


@rule("LS207", "clip-before-unscale")
def clip_before_unscale(facts: Facts) -> Places:
    """Gradients are clipped before they are unscaled.

    Gradients that are up to 65,536 times too large are clipped, and divided afterwards: nearly every update is tiny,
    and the network learns little or nothing.

    GradScaler multiplies the loss; the gradients stay scaled until scaler.unscale_(optimizer).

    Wrong:
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    Right:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    """
    for call, scope in facts.calls("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"):
        if last_name(receiver(call)) in ("accelerator", "fabric", "self"):
            continue
        before = [each for each in scope.calls if each.lineno <= call.lineno]
        scaled = [e for e in before if last_name(e) == "backward" and last_name(receiver(e)) == "scale"]
        unscaled = any("unscale" in last_name(each) for each in before)
        stepped = any(
            last_name(each) == "step" and "scaler" in last_name(receiver(each)).lower()
            for each in scope.calls
            if each.lineno > call.lineno
        )
        if scaled and stepped and not unscaled and not _other_path(facts, call, scaled[-1], scope):
            yield call, scope, ""


def _other_path(facts: Facts, first: ast.AST, second: ast.AST, scope: Scope) -> bool:
    """Whether two lines never run together, by the tests around them."""
    one = {ast.dump(each.test): each.answer for each in facts.conditions(first, scope)}
    return any(one.get(ast.dump(each.test), each.answer) != each.answer for each in facts.conditions(second, scope))


@rule("LS214", "eval-missing")
def eval_missing(facts: Facts) -> Places:
    """The model is evaluated in training mode.

    Dropout is active, and batch norm uses the statistics of the test batch and updates its running ones: the metric is
    too low and depends on the batch size.

    model.eval() is never called before the evaluation; torch.no_grad() does not change the mode.

    Wrong:
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images).argmax(1) == labels).sum()
    Right:
        model.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images).argmax(1) == labels).sum()
    """
    if "lightning" in facts.kinds or not facts.named(MODES):
        return
    for loop, scope in facts.evaluation_loops:
        if not sums_of(loop) or not facts.without_gradients(loop, scope) or _changes_mode(facts, scope, 2):
            continue
        named = any(re.search("load|data|batch|val|test", word, re.I) for word in words(getattr(loop, "iter", None)))
        if named or facts.loaders_of(loop, scope)[0]:
            yield loop, scope, ""


def _changes_mode(facts: Facts, scope: Scope, deep: int) -> bool:
    """Whether eval() is called in a function or in those that call it."""
    changes = re.compile(r"^eval$|eval_mode|to_eval|set_eval|switch|evaluating|from_pretrained|freeze")
    if any(changes.search(name) for name in facts.names_called(scope.node, scope, 1)):
        return True
    calls = [call for call in walk_calls(scope.node) if last_name(call) == "train" and receiver(call)]
    if any(call.args or call.keywords for call in calls):
        return True  # train(False)
    sites = facts.sites.get(scope, []) if deep else []
    return any(_changes_mode(facts, site.scope, deep - 1) for site in sites)


@rule("LS217", "cleared-before-update")
def cleared_before_update(facts: Facts) -> Places:
    """Accumulated gradients are cleared right before the update.

    Each update has the gradients of the last batch alone; the other batches are computed for nothing.

    In accumulate() the optimizer that Accelerate prepared does nothing on zero_grad() except in the pass that updates.

    Wrong:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(loss_function(model(x), y))
            optimizer.step()
    Right:
        with accelerator.accumulate(model):
            accelerator.backward(loss_function(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    """
    numbers = [(keyword(call, "gradient_accumulation_steps"), scope) for call, scope in facts.calls("Accelerator")]
    if not any(number and facts.constants(number, scope) != {1} for number, scope in numbers):
        return
    for call, scope in facts.calls("zero_grad"):
        for _, parent in scope.module.ancestors(call):
            if isinstance(parent, ast.With) and any(last_name(i.context_expr) == "accumulate" for i in parent.items):
                passes = [each.lineno for each in walk_calls(parent) if last_name(each) == "backward"]
                if passes and call.lineno < min(passes):
                    yield call, scope, ""
