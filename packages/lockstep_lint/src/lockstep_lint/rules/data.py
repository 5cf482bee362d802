"""LS1: which samples a rank sees, in which order, and what is counted over them."""

from __future__ import annotations

import ast
import re

from lockstep_lint.facts.modules import Scope
from lockstep_lint.facts.program import Value, calls_below
from lockstep_lint.facts.ranks import alone, guard
from lockstep_lint.facts.training import (
    REDUCES,
    SAMPLER,
    Facts,
    Loader,
    Loop,
    StepLoop,
    for_evaluation,
    for_training,
    sums_of,
)
from lockstep_lint.facts.tree import argument, keyword, last_name, literal, receiver, walk_calls, within, words
from lockstep_lint.rules import Places, rule

RANDOM = re.compile(
    r"rand|shuffle|permut|sample|fake|dummy|toy|synthetic|iterable|stream|webdataset|pipe|arange|linspace", re.I
)
SPLIT = re.compile(r"rank|world_size|num_replicas|shard|split_\w*(by|between)|webdataset|Pipe|randn|rand$")


@rule("LS101", "no-set-epoch")
def no_set_epoch(facts: Facts) -> Places:
    """set_epoch is never called.

    Every epoch has the order of the first one: the data are never shuffled again, and each rank keeps the same shard.

    DistributedSampler shuffles by seed + epoch, and its epoch stays 0 until set_epoch says otherwise. Accelerate,
    Fabric and Lightning call it themselves.

    Wrong:
        sampler = DistributedSampler(dataset)
        for epoch in range(epochs):
            train(DataLoader(dataset, sampler=sampler))
    Right:
        sampler = DistributedSampler(dataset)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            train(DataLoader(dataset, sampler=sampler))
    """
    covered = _samplers_with_epoch(facts)
    if covered is None or facts.kinds & {"accelerate", "fabric", "lightning"}:
        return
    loops = [loop for loop in facts.step_loops if any(not _runs_once(epochs) for epochs, _ in facts.epoch_loops(loop))]
    loaders = [loader for loop in loops for loader in facts.loaders_of(loop.node, loop.scope)[0]]
    samplers = [sampler for loader in loaders for sampler in facts.samplers(loader)]
    if loops and not loaders and not covered:  # what is trained on is not known, but nothing sets an epoch
        made = facts.calls("DistributedSampler")
        samplers = [Value(call, scope) for call, scope in made if not _for_test(call, scope)]
    for sampler in samplers:
        if _shuffles(facts, sampler) and sampler.expr not in covered:
            yield sampler.expr, sampler.scope, ""


def _samplers_with_epoch(facts: Facts) -> set[ast.expr] | None:
    """The samplers whose epoch is set; None if it is set of something unknown."""
    found: set[ast.expr] = set()
    for call, scope in facts.calls("set_epoch"):
        owner = receiver(call)
        while isinstance(owner, ast.Attribute) and owner.attr in ("sampler", "batch_sampler"):
            owner = owner.value
        known = False
        for value in facts.sources(owner, scope):
            loader = facts.loader(value)
            if loader or (isinstance(value.expr, ast.Call) and SAMPLER.search(last_name(value.expr))):
                found |= {sampler.expr for sampler in facts.samplers(loader)} if loader else {value.expr}
                known = True
        if not known:
            return None
    return found


def _shuffles(facts: Facts, sampler: Value) -> bool:
    call = sampler.expr
    if not isinstance(call, ast.Call) or not re.search(r"^Distributed\w*Sampler$|^RASampler$", last_name(call)):
        return False
    local = facts.resolve(call.func, sampler.scope)
    if local and "set_epoch" not in local.inner and not getattr(local.node, "bases", []):
        return False
    shuffle = argument(call, 3, "shuffle")
    return shuffle is None or facts.constant(shuffle, sampler.scope) is True


def _runs_once(loop: Loop) -> bool:
    call = None if isinstance(loop, ast.While) else loop.iter
    numbers = [literal(each) for each in call.args] if isinstance(call, ast.Call) else []
    return last_name(call) == "range" and numbers in ([1], [0, 1])


def _for_test(call: ast.Call, scope: Scope) -> bool:
    """Whether a loader or a sampler is for validation or test, by the names around it."""
    statement = next((child for child, _ in scope.module.ancestors(call) if isinstance(child, ast.stmt)), call)
    given = words(*(getattr(statement, "targets", None) or [getattr(statement, "target", None)]))
    taken = words(*(call.args[:1] or [each.value for each in call.keywords[:1]]))
    for names in (given, taken, [scope.name]):
        trains = any(for_training(name) for name in names)
        if trains or any(for_evaluation(name) for name in names):
            return not trains
    return False


@rule("LS104", "shard-taken-for-whole")
def shard_taken_for_whole(facts: Facts) -> Places:
    """A rank's shard of the test set is taken for the whole.

    The metric is of 1/N of the samples and differs from rank to rank; the best checkpoint, early stopping and the
    learning rate depend on one shard.

    The loader gives each rank its own shard, and nothing adds up the ranks' sums. A loader without a sampler is right
    too: then each rank evaluates the whole set.

    Wrong:
        for images, labels in loader:  # with a DistributedSampler
            correct += (model(images).argmax(1) == labels).sum()
        print(correct / len(dataset))
    Right:
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum()
        dist.all_reduce(correct)
        print(correct / len(dataset))
    """
    if "lightning" in facts.kinds:
        yield from _logged_unreduced(facts)
    for loop, scope in facts.evaluation_loops if facts.several else ():
        loaders, values = facts.loaders_of(loop, scope)
        parted = [loader for loader in loaders if facts.shares(loader, values)]
        if not parted or not sums_of(loop) or any(facts.trains_on(loader) for loader in parted):
            continue
        if not _reduced(facts, loop, scope):
            yield loop, scope, ""


def _logged_unreduced(facts: Facts) -> Places:
    """What a LightningModule logs of its validation without sync_dist: one rank's own mean."""
    seen: set[Scope | None] = set()
    for call, scope in facts.calls("log", "log_dict"):
        if not re.search(r"^(on_)?(validation|test)_(step|epoch_end)$", scope.name) or scope.owner in seen:
            continue
        value = argument(call, 1, "value") if last_name(call) == "log" else argument(call, 0, "dictionary")
        if value is None or keyword(call, "sync_dist") or keyword(call, "rank_zero_only"):
            continue
        metrics = scope.module.says(r"torchmetrics|pytorch_lightning\.metrics|MetricCollection")
        if metrics and not any("loss" in word for word in words(value)):
            continue  # metric objects reduce by themselves
        said = [*words(value), *(last_name(each) for each in scope.calls)]
        if last_name(receiver(call)) == "self" and not any(REDUCES.search(each) for each in said):
            seen.add(scope.owner)
            yield call, scope, "logged without sync_dist=True"


def _reduced(facts: Facts, loop: Loop, scope: Scope) -> bool:
    """Whether something around a loop may add the ranks' numbers up: in its function, or where its result goes."""
    while scope.outer and scope.outer.is_function:
        scope = scope.outer
    if any(each.scope is scope for each in facts.step_loops):  # it is not a function for evaluation alone
        names = facts.derived(sums_of(loop), scope)
        calls = [call for call in scope.calls if names & words(call) or within(call, loop)]
    else:
        calls = [call for call, _ in calls_below(scope.node, scope)]
    if any(REDUCES.search(name) for call in calls for name in facts.names_called(call, scope, 2)):
        return True
    if scope.module.says(r"torchmetrics|evaluate\.load"):
        return True
    for site in facts.sites.get(scope, []):
        names = facts.results(site.call, site.scope)
        for call in site.scope.calls:
            if call is not site.call and names & words(call):
                called = facts.names_called(call, site.scope, 1)
                if any(REDUCES.search(name) for name in called):
                    return True
    return False


@rule("LS108", "every-rank-downloads")
def every_rank_downloads(facts: Facts) -> Places:
    """Every rank downloads the data.

    N processes fetch and unpack the same files at once: one reads what another is still writing, and the first run on a
    new machine ends with a broken archive or a wrong checksum.

    Where each machine has its own disk, test the local rank.

    Wrong:
        dataset = MNIST(root, download=True)
    Right:
        if rank == 0:
            MNIST(root, download=True)
        dist.barrier()
        dataset = MNIST(root)
    """
    if not facts.several:
        return
    fetching = [
        (call, scope)
        for scope in facts.reached
        for call in scope.calls
        if (value := keyword(call, "download")) is not None
        and facts.constant(value, scope) is True
        and not (scope.name == "prepare_data" and "lightning" in facts.kinds)  # called on one rank
        and _public_set(facts, call, scope)
    ]
    first = {
        last_name(call)
        for call, scope in fetching
        if guard(facts, call, scope)
        or not (facts.per_rank(scope) or any(site.started for site in facts.sites.get(scope, [])))
    }
    seen: set[Scope] = set()
    for call, scope in fetching:
        if scope in seen or last_name(call) in first or alone(facts, call, scope) or not facts.per_rank(scope):
            continue
        if not one_goes_first(facts, call, scope):
            seen.add(scope)
            yield call, scope, ""


def _public_set(facts: Facts, call: ast.Call, scope: Scope) -> bool:
    """Whether a call makes a data set of torchvision's or torchaudio's, or of a class that is made of one."""
    local = facts.resolve(call.func, scope)
    names = [facts.qualified(call, scope)]
    if local and isinstance(local.node, ast.ClassDef):
        names = [facts.qualified(base, local) for base in local.node.bases]
    return any("torchvision" in name or "torchaudio" in name or name.startswith("datasets.") for name in names)


def one_goes_first(facts: Facts, call: ast.AST, scope: Scope, deep: int = 2) -> bool:
    """Whether one rank passes a line before the others: by a context manager, or by barriers reached apart."""
    for _, parent in scope.module.ancestors(call):
        if isinstance(parent, ast.With):
            said = words(*(item.context_expr for item in parent.items))
            if any(re.search("first|zero|lock", word, re.I) for word in said):
                return True
    waits = [each for each in scope.calls if last_name(each) in ("barrier", "wait_for_everyone")]
    if any(guard(facts, each, scope, 0) is not None for each in waits):
        return True
    sites = facts.sites.get(scope, []) if deep else []
    return any(one_goes_first(facts, site.call, site.scope, deep - 1) for site in sites)


@rule("LS110", "workers-seeded-alike")
def workers_seeded_alike(facts: Facts) -> Places:
    """The seeds of the loader's workers do not depend on the rank.

    The k-th workers of all ranks draw the same random augmentations, and the same again in each epoch.

    Wrong:
        loader = DataLoader(dataset, worker_init_fn=lambda worker: random.seed(seed + worker))
    Right:
        loader = DataLoader(dataset, worker_init_fn=lambda worker: random.seed(torch.initial_seed() % 2**32))
    """
    own = re.compile("rank|initial_seed|info|random|time|epoch|base_seed|SeedSequence", re.I)
    for loader in facts.loaders if facts.several else ():
        given = keyword(loader.call, "worker_init_fn")
        if given is None or not (facts.samplers(loader) or facts.trains_on(loader)):
            continue
        for value in facts.sources(given, loader.scope):
            bound = value.expr if isinstance(value.expr, ast.Call) and last_name(value.expr) == "partial" else None
            named = bound.args[0] if bound else value.expr
            function = value.scope.module.scopes.get(named) or facts.resolve(named, value.scope)
            seeds = [call for call in function.calls if re.search("seed", last_name(call))] if function else []
            sources = [v.expr for c in seeds for a in c.args for v in facts.sources(a, function or value.scope)]
            if seeds and not any(own.search(word) for word in words(bound, *sources)):
                yield loader.call, loader.scope, ""
                break


@rule("LS112", "never-shuffled")
def never_shuffled(facts: Facts) -> Places:
    """The training loader is never shuffled.

    Every epoch has the samples in the order of the files. Most image folders are sorted by class: then a batch has one
    class, and the network forgets the others.

    Random data, streams and data sets that are shuffled beforehand are left alone.

    Wrong:
        for images, labels in DataLoader(train_set, batch_size=64):
            step(images, labels)
    Right:
        for images, labels in DataLoader(train_set, batch_size=64, shuffle=True):
            step(images, labels)
    """
    for loader, _ in _training_loaders(facts):
        samplers = facts.samplers(loader)
        made = [each.expr for each in samplers if isinstance(each.expr, ast.Call)]
        orders = [call for call in made if last_name(call) == "DistributedSampler"]
        fixed = [call for call in orders if literal(argument(call, 3, "shuffle")) is False]
        plain = loader.closed and loader.shuffle is None and _no_sampler(facts, loader)
        if (plain or (fixed and len(fixed) == len(samplers))) and _ordered(facts, loader):
            yield loader.call, loader.scope, "by its DistributedSampler" if fixed else ""


def _training_loaders(facts: Facts, wrapped: bool = False) -> list[tuple[Loader, list[Value]]]:
    """The loaders of training loops, or only of those that train a model in DDP."""
    found: dict[Loader, list[Value]] = {}
    for loop in facts.step_loops:
        loaders, values = facts.loaders_of(loop.node, loop.scope)
        if not wrapped or _trains_ddp(facts, loop):
            found.update({loader: values for loader in loaders if not _for_test(loader.call, loader.scope)})
    return list(found.items())


def _trains_ddp(facts: Facts, loop: StepLoop) -> bool:
    """Whether a training loop calls a model in DDP, as far as can be seen."""
    places = [(call, loop.scope) for call in walk_calls(loop.node)]
    places += [(call, loop.backward_scope) for call in loop.backward_scope.calls]
    return any(facts.is_wrapped(call.func, scope) for call, scope in places if not facts.resolve(call.func, scope))


def _no_sampler(facts: Facts, loader: Loader) -> bool:
    return loader.sampler is None or facts.constant(loader.sampler, loader.scope) is None


def _ordered(facts: Facts, loader: Loader) -> bool:
    """Whether a data set has an order of its own: known, and neither drawn, shuffled nor a stream."""
    known = False
    for value in facts.sources(loader.dataset, loader.scope):
        kind = facts.resolve(value.expr.func, value.scope) if isinstance(value.expr, ast.Call) else None
        if any(RANDOM.search(word) for word in words(value.expr, kind.node if kind else None)):
            return False
        public = re.search(r"torchvision|datasets|ImageFolder|Dataset$", facts.qualified(value.expr, value.scope))
        known = known or (kind.is_class if kind else isinstance(value.expr, ast.Call) and public is not None)
    return known


@rule("LS113", "not-sharded")
def not_sharded(facts: Facts) -> Places:
    """Every rank trains on the whole data set.

    N processes see the same samples: an epoch takes as long as on one process, each sample counts N times, and with
    equal seeds all ranks compute the same gradients.

    The loader has no sampler, and nothing else gives each rank its own shard. A stream (IterableDataset) has to look
    at the rank by itself.

    Wrong:
        loader = DataLoader(dataset, batch_size=64, shuffle=True)
        model = DistributedDataParallel(model)
    Right:
        loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))
        model = DistributedDataParallel(model)
    """
    if not facts.by_hand or not facts.wraps or facts.sharded_model:
        return
    for loader, values in _training_loaders(facts, wrapped=True):
        if not loader.closed or alone(facts, loader.call, loader.scope) or not facts.per_rank(loader.scope):
            continue
        if _no_sampler(facts, loader) and not facts.shares(loader, values) and not _split(facts, loader, values):
            yield loader.call, loader.scope, ""


def _split(facts: Facts, loader: Loader, values: list[Value]) -> bool:
    """Whether the data set, or another loader of the same loop, knows the rank; true if the data set is not known."""
    others = [facts.loader(value) for value in values]
    if any(other and other is not loader and other.sampler is not None for other in others):
        return True
    known = False
    for value in facts.sources(loader.dataset, loader.scope):
        kind = facts.resolve(value.expr.func, value.scope) if isinstance(value.expr, ast.Call) else None
        said = words(value.expr, kind.node if kind else None)
        drawn = "IterableDataset" in said and any(RANDOM.search(word) for word in said if "terable" not in word)
        if drawn or any(SPLIT.search(word) for word in said):
            return True
        known = known or (kind.is_class if kind else isinstance(value.expr, ast.Call))
    return not known


@rule("LS114", "workers-for-all-cores")
def workers_for_all_cores(facts: Facts) -> Places:
    """Each rank starts a loader's worker for each core.

    A machine with N ranks runs N times as many workers as it has cores: loading gets slower, and each worker holds
    memory of its own.

    Wrong:
        loader = DataLoader(dataset, num_workers=os.cpu_count())
    Right:
        loader = DataLoader(dataset, num_workers=os.cpu_count() // ranks_on_this_machine)
    """
    for loader in facts.loaders if facts.several else ():
        values = facts.sources(keyword(loader.call, "num_workers"), loader.scope)
        counted = any(isinstance(v.expr, ast.Call) and last_name(v.expr) == "cpu_count" for v in values)
        if counted and facts.per_rank(loader.scope) and not alone(facts, loader.call, loader.scope):
            yield loader.call, loader.scope, ""


@rule("LS212", "split-differs")
def split_differs(facts: Facts) -> Places:
    """Ranks split the data by different random numbers.

    What one rank holds out, another trains on: the test metric is of samples that the model has seen.

    The random generator has no seed, so each process draws its own split.

    Wrong:
        train_set, test_set = random_split(dataset, [0.9, 0.1])
    Right:
        generator = torch.Generator().manual_seed(0)
        train_set, test_set = random_split(dataset, [0.9, 0.1], generator)
    """
    if not facts.by_hand or not facts.wraps or facts.named("(?i)seed"):
        return
    for call, scope in facts.calls("random_split", "train_test_split"):
        if facts.resolve(call.func, scope) or not facts.per_rank(scope) or alone(facts, call, scope):
            continue
        generator = (
            argument(call, 2, "generator") if last_name(call) == "random_split" else keyword(call, "random_state")
        )
        if generator is None and literal(keyword(call, "shuffle")) is not False:
            yield call, scope, ""
