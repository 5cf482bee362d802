"""Each rule on wrong scripts, which are right ones with a few lines changed, and on right ones that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

import bases
from bases import ACCELERATE, ACCUMULATION, DDP, FLAT, HOROVOD, LIGHTNING, ONE_PROCESS, SPAWN
from conftest import Lint
from lockstep_lint.rules import all_rules

Change = tuple[str, str]  # a text that occurs once, and what stands there instead


def changed(base: str, changes: tuple[Change, ...]) -> str:
    """A base script with its changes; `old` may leave out the end of a text that occurs once."""
    for old, new in changes:
        assert base.count(old) == 1, f"{base.count(old)} times: {old}"
        base = base.replace(old, new)
    return base


def wrong(code: str, base: str, line: str, *changes: Change) -> tuple[str, str, str, tuple[Change, ...]]:
    """A script with one fault, found on a line that has this text."""
    return code, base, line, changes


def before(line: str, *new: str) -> Change:
    """Lines put before a line, at its indentation."""
    indent = line[: len(line) - len(line.lstrip())]
    return line, "".join(f"{indent}{each}\n" for each in new) + line


def without(text: str) -> Change:
    """A text left out."""
    return text, ""


SAVE = DDP[DDP.index("        if is_main_process():") : DDP.index("        best = max")]
SAVE_BY_ALL = "".join(line[4:] if line.startswith("    " * 3) else "" for line in SAVE.splitlines(keepends=True))
FETCH = DDP[DDP.index("    if rank == 0:\n        datasets") : DDP.index("    train_set")]
STREAM = "\n\nclass NAME(IterableDataset):\n    def __iter__(self):\n        LINE\n"
SET_SEED = "\n\ndef set_seed(worker, base):\n    random.seed(base + worker)\n"
ON_RANK_0 = "    if rank == 0:\n        torch.save(model.state_dict(), 'end.pt')\n"
LOADS_THE_END = "\n\ndef test():\n    return torch.load('end.pt', map_location='cpu')\n"
STEP = ACCUMULATION[ACCUMULATION.index("        with nullcontext()") : ACCUMULATION.index("        if update:")]
ALL_SYNC = "".join(line[4:] for line in STEP.splitlines(keepends=True)[1:])
DEVICE = '    torch.cuda.set_device(local_rank)\n    device = torch.device("cuda", local_rank)\n'
GROUP = '    dist.init_process_group("nccl")\n    rank = dist.get_rank()\n'

EVALUATE = """def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(1).cuda()
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images.cuda()).argmax(1) == labels.cuda()).sum()
    dist.all_reduce(correct)
    print(correct)


"""
PASS = ACCELERATE[ACCELERATE.index("            optimizer.zero_grad()") : ACCELERATE.index("        model.eval()")]
WITH = "            with accelerator.accumulate(model):\n"
ACCUMULATED = (
    (PASS, WITH + "".join(f"    {line}" for line in PASS.splitlines(keepends=True))),
    ("Accelerator()", "Accelerator(gradient_accumulation_steps=4)"),
)
INNER_LOOP = (  # four batches for each update
    ("import torch\n", "import torch\n\nK = 4\n"),
    ("            accelerator.backward(", "            for _ in range(K):\n                accelerator.backward("),
)
MADE_ON_RANK_0 = (
    (
        "def main():",
        "class Average:\n    def __init__(self, accelerator):\n        if accelerator.is_main_process:\n"
        "            self.ema = EMA()\n\n    def load(self):\n        self.ema.load()\n\n\ndef main():",
    ),
    ("    accelerator = Accelerator()\n", "    accelerator = Accelerator()\n    Average(accelerator)\n"),
)

WRONG = [
    wrong("LS101", DDP, "DistributedSampler(train_set)", without("        sampler.set_epoch(epoch)\n")),
    wrong("LS101", SPAWN, "DistributedSampler(dataset)", without("        self.loader.sampler.set_epoch(epoch)\n")),
    wrong("LS101", HOROVOD, "sampler = Dist", without("    sampler.set_epoch(epoch)\n")),
    wrong("LS101", DDP, "train_loader", ("sampler=sampler)", "sampler=DistributedSampler(train_set))")),
    wrong("LS104", DDP, "for images, labels in loader:", without("    dist.all_reduce(sums)\n")),
    wrong("LS104", FLAT, "in test_loader:", without("    dist.all_reduce(correct)\n")),
    wrong("LS104", HOROVOD, "in test_loader:", without("    correct = hvd.allreduce(correct, op=hvd.Sum)\n")),
    wrong(
        "LS104",
        ACCELERATE,
        "in test_loader:",
        without("            predictions, labels = accelerator.gather_for_metrics((predictions, labels))\n"),
    ),
    wrong("LS104", LIGHTNING, "self.log(", without(", sync_dist=True")),
    wrong("LS108", DDP, "train_set", without(FETCH), ("train=True, transform", "train=True, download=True, transform")),
    wrong(
        "LS108",
        SPAWN,
        "dataset = ",
        without('    datasets.MNIST("data", download=True)\n'),
        ('("data", transform', '("data", download=True, transform'),
    ),
    wrong("LS112", ONE_PROCESS, "train_loader", without(", shuffle=True")),
    wrong("LS112", ACCELERATE, "train_loader", without(", shuffle=True")),
    wrong(
        "LS112", DDP, "train_loader", ("DistributedSampler(train_set)", "DistributedSampler(train_set, shuffle=False)")
    ),
    wrong(
        "LS108",
        LIGHTNING,
        "train_set",
        ('datasets.ImageFolder("data/train", ', 'datasets.MNIST("data", download=True, transform='),
    ),
    wrong("LS113", DDP, "train_loader", ("batch_size=64, sampler=sampler", "batch_size=64, shuffle=True")),
    wrong(
        "LS113",
        DDP,
        "train_loader",
        ("batch_size=64, sampler=sampler", "batch_size=64"),
        ("train_set, batch_size", "Lines('train.txt'), batch_size"),
        (
            "\n\ndef train_one",
            STREAM.replace("NAME", "Lines").replace("LINE", "yield from read(path)") + "\n\ndef train_one",
        ),
    ),
    wrong(
        "LS110",
        DDP,
        "train_loader",
        ("sampler=sampler)", "sampler=sampler, worker_init_fn=lambda k: random.seed(k + 1))"),
    ),
    wrong(
        "LS110",
        DDP,
        "train_loader",
        ("sampler=sampler)", "sampler=sampler, worker_init_fn=partial(set_seed, base=args.seed))"),
        ("\n\ndef train_one", SET_SEED + "\n\ndef train_one"),
    ),
    wrong(
        "LS212",
        DDP,
        "random_split",
        without("    torch.manual_seed(0)\n"),
        before("    sampler = Dist", "train_set, rest = random_split(train_set, [40_000, 10_000])"),
    ),
    wrong("LS114", DDP, "DataLoader(train_set", ("sampler=sampler)", "sampler=sampler, num_workers=os.cpu_count())")),
    wrong("LS217", ACCELERATE, "zero_grad()", *ACCUMULATED),
    wrong("LS201", ACCUMULATION, "scaler.scale(loss).backward()", without("            loss = loss / K\n")),
    wrong("LS204", FLAT, "plateau.step", without("    dist.all_reduce(total)\n")),
    wrong("LS204", DDP, "scheduler.step(loss)", without("    dist.all_reduce(total)\n")),
    wrong(
        "LS204",
        DDP,
        "len(loader.dataset)",
        without("    dist.all_reduce(total)\n"),
        without("        scheduler.step(loss)\n"),
        ("(total[0] / total[1])", "(total / len(loader.dataset))"),
        ("ReduceLROnPlateau(optimizer)", "ConstantLR(optimizer)"),
    ),
    wrong(
        "LS204",
        DDP,
        "get_world_size()).item",
        ("    dist.all_reduce(total)\n", "    torch.cuda.synchronize()\n"),
        without("        scheduler.step(loss)\n"),
        ("(total[0] / total[1])", "(total / dist.get_world_size())"),
    ),
    wrong("LS206", HOROVOD, "    hvd.allreduce", ("    correct = hvd.allreduce", "    hvd.allreduce")),
    wrong("LS206", DDP, "all_reduce(sums", ("all_reduce(sums)", "all_reduce(sums.clone())")),
    wrong("LS206", DDP, "all_reduce(sums", ("all_reduce(sums)", "all_reduce(sums / 2)")),
    wrong("LS207", ACCUMULATION, "clip_grad_norm_(", without("            scaler.unscale_(optimizer)\n")),
    wrong("LS214", ONE_PROCESS, "for images, labels in loader:", without("    model.eval()\n")),
    wrong("LS214", DDP, "for images, labels in loader:", without("    model.eval()\n")),
    wrong(
        "LS302",
        DDP,
        "model.module(images)",
        ("F.cross_entropy(model(images), labels)", "F.cross_entropy(model.module(images), labels)"),
    ),
    wrong(
        "LS302",
        DDP,
        "plain(images)",
        (
            "    model.train()\n",
            "    model.train()\n    plain = model.module if isinstance(model, DistributedDataParallel) else model\n",
        ),
        ("F.cross_entropy(model(images), labels)", "F.cross_entropy(plain(images), labels)"),
    ),
    wrong(
        "LS303",
        DDP,
        "torch.cuda.set_device",
        (
            '    local_rank = int(os.environ["LOCAL_RANK"])\n' + DEVICE + GROUP,
            GROUP + DEVICE.replace("local_rank", "rank"),
        ),
        ("device_ids=[local_rank]", "device_ids=[rank]"),
    ),
    wrong(
        "LS303",
        DDP,
        "set_device(rank)",
        ("set_device(local_rank)", "set_device(rank)"),
        before("    torch.cuda.set", 'rank = int(os.environ["NODE_RANK"]) * args.gpus + int(os.environ["LOCAL_RANK"])'),
        without("    rank = dist.get_rank()\n"),
    ),
    wrong(
        "LS304",
        DDP,
        '"--local_rank"',
        before("    args = parser", 'parser.add_argument("--local_rank", type=int, default=0)'),
        ('int(os.environ["LOCAL_RANK"])', "args.local_rank"),
    ),
    wrong(
        "LS308",
        DDP,
        "all_reduce(sums)",
        ("    dist.all_reduce(sums)\n", "    if is_main_process():\n        dist.all_reduce(sums)\n"),
    ),
    wrong(
        "LS308",
        DDP,
        "accuracy = evaluate",
        ("        accuracy = evaluate", "        if rank == 0:\n            accuracy = evaluate"),
        without("        best = max(best, accuracy)\n"),
    ),
    wrong("LS308", DDP, "break", before("        best = max", "if is_main_process() and accuracy > 0.9:", "    break")),
    wrong("LS308", DDP, "isnan", before("        loss.backward()", "if torch.isnan(loss):", "    continue")),
    wrong(
        "LS308",
        ACCELERATE,
        "wait_for_everyone",
        ("        accelerator.wait_for", "        if accelerator.is_main_process:\n            accelerator.wait_for"),
    ),
    wrong(
        "LS308",
        DDP,
        "accuracy = evaluate",
        ("        accuracy = evaluate", "        if rank == 0:\n            accuracy = evaluate"),
        without("    dist.all_reduce(sums)\n"),
        (", sampler=DistributedSampler(test_set, shuffle=False)", ""),
        ("        best = max(best, accuracy)\n", ""),
    ),
    wrong("LS308", DDP, "model(images)", before("        best = max", "if rank == 0:", "    print(model(images))")),
    wrong("LS309", DDP, "barrier", before("        loss.backward()", "dist.barrier()")),
    wrong(
        "LS309",
        ACCELERATE,
        "wait_for_everyone",
        *INNER_LOOP,
        ("K = 4", "K = 1"),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n            accelerator.wait_for_everyone()\n",
        ),
        ("        accelerator.wait_for_everyone()\n        if", "        if"),
    ),
    wrong("LS311", ACCUMULATION, "backward()", (STEP, ALL_SYNC)),
    wrong("LS311", ACCELERATE, "accelerator.backward", *INNER_LOOP),
    wrong("LS311", ACCELERATE, "accelerator.backward", *INNER_LOOP, ("K = 4", "K = 1"), ("\n\nmain()\n", "\n")),
    wrong(
        "LS309",
        ACCELERATE,
        "wait_for_everyone",
        *INNER_LOOP,
        ("K = 4", "K = 1"),
        (
            "                accelerator.back",
            "                accelerator.wait_for_everyone()\n                accelerator.back",
        ),
        ("        accelerator.wait_for_everyone()\n        if", "        if"),
    ),
    wrong(
        "LS322",
        FLAT,
        "evaluate(model",
        ("torch.cuda.set_device(", EVALUATE + "torch.cuda.set_device("),
        ("        total += loss.detach()\n", "        total += loss.detach()\n        evaluate(model, test_loader)\n"),
    ),
    wrong(
        "LS318",
        DDP,
        "DistributedDataParallel(model",
        ('torch.device("cuda", local_rank)', 'torch.device("cuda:0")'),
        without(", device_ids=[local_rank]"),
    ),
    wrong(
        "LS318",
        SPAWN,
        "DDP(model",
        without("    torch.cuda.set_device(rank)\n"),
        ("model.to(rank), device_ids=[rank]", "model.cuda()"),
        ("images.to(self.rank), labels.to(self.rank)", "images.cuda(), labels.cuda()"),
    ),
    wrong(
        "LS318", DDP, "CUDA_VISIBLE", ("import torch\n", 'import torch\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n')
    ),
    wrong("LS318", HOROVOD, "DistributedOptimizer", without("torch.cuda.set_device(hvd.local_rank())\n")),
    wrong(
        "LS319",
        SPAWN,
        "init_process_group",
        ("DDP(model.to(rank), device_ids=[rank])", "model.to(rank)"),
        ("model.module.state", "model.state"),
    ),
    wrong(
        "LS321",
        DDP,
        "print(writer)",
        before("    start, best", "if rank == 0:", "    writer = open('log')", "print(writer)"),
    ),
    wrong(
        "LS321",
        SPAWN,
        "self.writer.close()",
        (
            "        self.loader = loader\n",
            "        self.writer = None\n        if rank == 0:\n            self.writer = Writer()\n",
        ),
        ("    def save(self, epoch):\n", "    def save(self, epoch):\n        self.writer.add(epoch)\n"),
        ("        for epoch in range(epochs):\n", "        self.writer.close()\n        for epoch in range(epochs):\n"),
    ),
    wrong(
        "LS321",
        ACCELERATE,
        "self.ema.load()",
        *MADE_ON_RANK_0,
    ),
    wrong("LS401", DDP, "torch.save", (SAVE, SAVE_BY_ALL)),
    wrong("LS401", SPAWN, "torch.save", ("            if self.rank == 0:\n                self", "            self")),
    wrong("LS401", HOROVOD, "torch.save", ("    if hvd.rank() == 0:\n        torch.save", "    torch.save")),
    wrong(
        "LS401", DDP, "FileHandler", before("    start, best", 'log.addHandler(logging.FileHandler("run.log", "w"))')
    ),
    wrong("LS401", DDP, "filemode", before("    start, best", 'logging.basicConfig(filename="run.log", filemode="w")')),
    wrong(
        "LS401",
        SPAWN,
        "self.save(10)",
        ("                self.save(epoch)\n", "                self.save(epoch)\n        self.save(10)\n"),
    ),
    wrong("LS402", DDP, "torch.load", without(', map_location="cpu"')),
    wrong("LS403", SPAWN, "state_dict()", ("self.model.module.state_dict()", "self.model.state_dict()")),
    wrong("LS404", DDP, "state = {", without('                "optimizer": optimizer.state_dict(),\n')),
    wrong("LS404", DDP, "state = {", without('                "scheduler": scheduler.state_dict(),\n')),
    wrong(
        "LS406",
        SPAWN,
        "torch.load",
        (
            "    trainer.train(10)\n",
            "    trainer.train(10)\n" + ON_RANK_0 + "    test()\n",
        ),
        ("\n\nclass Trainer", LOADS_THE_END + "\n\nclass Trainer"),
    ),
    wrong("LS407", DDP, "start_epoch", ('start = checkpoint["epoch"] + 1', 'start_epoch = checkpoint["epoch"] + 1')),
    wrong("LS409", DDP, '"--resume"', before("    args = parser", 'parser.add_argument("--resume", default="")')),
    wrong(
        "LS410", DDP, "makedirs", before("    start, best", "if not os.path.exists('out'):", "    os.makedirs('out')")
    ),
]


def right(base: str, *changes: Change) -> tuple[str, tuple[Change, ...]]:
    """A script that only looks wrong."""
    return base, changes


HELPER = "\n\ndef reduce_all(tensor):\n    tensor = tensor.clone()\n    dist.all_reduce(tensor)\n    return tensor\n"
ASKS_FIRST = """

class Ranked(Trainer):
    def save(self, epoch):
        if self.rank == 0:
            super().save(epoch)
"""
SAVER = "\n\nclass Saver:\n    def save(self, state, path):\n        torch.save(state, path)\n"
WHEN_SPAWNED = "    args = parser.parse_args()\n"

RIGHT = [
    # LS101: an epoch, an order that is fixed on purpose, something else that may set the epoch
    right(DDP, without("        sampler.set_epoch(epoch)\n"), ("range(start, args.epochs)", "range(1)")),
    right(DDP, ("sampler.set_epoch(epoch)", "unknown().set_epoch(epoch)")),
    # LS112, LS113: one line for both cases; arguments that are not known; a set that knows the rank
    right(DDP, ("64, sampler=sampler", "64, shuffle=sampler is None, sampler=sampler")),
    right(ONE_PROCESS, ("(train_set, batch_size=64, shuffle=True)", "(train_set, **OPTIONS)")),
    right(ONE_PROCESS, without(", shuffle=True"), before("train_loader =", "train_set = shuffled(train_set)")),
    right(
        DDP,
        ("64, sampler=sampler", "64, shuffle=True"),
        before("    train_loader", "train_set = shard(train_set, rank)"),
    ),
    right(LIGHTNING, without(", shuffle=True")),  # it shuffles by itself
    right(
        DDP,
        ("train_set, batch_size=64, sampler=sampler", "Numbers(), batch_size=64"),
        (
            "\n\ndef train_one",
            STREAM.replace("NAME", "Numbers").replace("LINE", "yield random.choice(TEXTS)") + "\n\ndef train_one",
        ),
    ),
    # LS110: a seed of the worker's own
    right(
        DDP, ("sampler=sampler)", "sampler=sampler, worker_init_fn=lambda k: random.seed(torch.initial_seed() + k))")
    ),
    right(DDP, ("sampler=sampler)", "sampler=sampler, worker_init_fn=lambda k: random.seed(8 * rank + k))")),
    # LS104: the whole set on each rank; a helper with a telling name; the caller adds up; metric objects
    right(DDP, without("    dist.all_reduce(sums)\n"), (", sampler=DistributedSampler(test_set, shuffle=False)", "")),
    right(DDP, ("    dist.all_reduce(sums)\n", "    sums = across_ranks(sums)\n")),
    right(
        DDP,
        without("    dist.all_reduce(sums)\n"),
        ("return (sums[0] / sums[1]).item()", "return sums"),
        (
            "accuracy = evaluate(model, test_loader, device)",
            "accuracy = evaluate(model, test_loader, device)\n        dist.all_reduce(accuracy)",
        ),
    ),
    # LS108: one goes first
    right(
        DDP,
        without(FETCH),
        (
            "    train_set = ",
            "    with zero_first(rank):\n        datasets.CIFAR10('data', download=True)\n    train_set = ",
        ),
    ),
    right(DDP, (FETCH, '    datasets.CIFAR10("data", download=rank == 0)\n    dist.barrier()\n')),
    right(
        SPAWN,
        ("mp.spawn(run", "mp.Process(target=test).start()\n    mp.spawn(run"),
        ("def run(", "def test():\n    datasets.FashionMNIST('data', download=True)\n\n\ndef run("),
    ),
    # LS201, LS311: a sum is meant; the gradients are divided; k is 1 by default
    right(ACCUMULATION, ("            loss = loss / K\n", "            loss *= 1 / K\n")),
    right(
        ACCUMULATION, without("            loss = loss / K\n"), ("labels.cuda())", 'labels.cuda(), reduction="sum")')
    ),
    right(ACCUMULATION, ("            loss = loss / K\n", "            loss = loss.sum()\n")),
    right(ACCUMULATION, without("            loss = loss / K\n"), ("optim.SGD(", "optim.AdamW(")),
    right(ACCUMULATION, (STEP, ALL_SYNC), ("K = 4", "K = 1")),
    # LS204: a mean that is only printed
    right(
        DDP,
        without("    dist.all_reduce(total)\n"),
        ("scheduler.step(loss)", "print(loss)"),
        ("ReduceLROnPlateau", "StepLR"),
    ),
    # LS204: one function trains on a shard and tests on the whole set
    right(
        DDP,
        without("    dist.all_reduce(total)\n"),
        (
            "        scheduler.step(loss)",
            "        loss = train_one_epoch(model, test_loader, None, device)\n        scheduler.step(loss)",
        ),
        (
            "        loss = train_one_epoch(model, train_loader, optimizer, device)\n",
            "        train_one_epoch(model, train_loader, optimizer, device)\n",
        ),
        (", sampler=DistributedSampler(test_set, shuffle=False)", ""),
    ),
    # LS206: in place, or kept
    right(
        DDP,
        ("    dist.all_reduce(sums)\n", "    sums = reduce_all(sums)\n"),
        ("\n\ndef train_one", HELPER + "\n\ndef train_one"),
    ),
    right(HOROVOD, ("    correct = hvd.allreduce(correct, op=hvd.Sum)\n", "    hvd.allreduce_(correct, op=hvd.Sum)\n")),
    # LS207: another path
    right(
        ACCUMULATION,
        (
            "            scaler.unscale_(optimizer)\n            clip",
            "            if clip:\n                scaler.unscale_(optimizer)\n            clip",
        ),
    ),
    # LS214: the caller calls eval, or a helper does
    right(ONE_PROCESS, without("    model.eval()\n"), before("    print(test(", "model.train(False)")),
    right(ONE_PROCESS, ("    model.eval()\n", "    set_eval(model)\n")),
    # LS303, LS304: a rank modulo the GPUs; the variable is read too
    right(
        DDP, ("torch.cuda.set_device(local_rank)", "torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())")
    ),
    right(
        DDP,
        before(WHEN_SPAWNED, 'parser.add_argument("--local_rank", type=int)', "print(parser.parse_args().local_rank)"),
    ),
    # LS308: both branches; a pair of barriers; a script that ends; a test of the number of processes
    right(
        DDP,
        before(
            "    dist.all_reduce(sums)", "if is_main_process():", "    dist.barrier()", "else:", "    dist.barrier()"
        ),
    ),
    right(
        DDP,
        (
            FETCH,
            "    if rank != 0:\n        dist.barrier()\n    prepare()\n    if rank == 0:\n        dist.barrier()\n",
        ),
    ),
    right(DDP, before("    train_set = ", "if rank != 0 and dist.get_world_size() == 1:", "    raise SystemExit(1)")),
    right(DDP, ("    dist.all_reduce(sums)\n", "    if dist.get_world_size() > 1:\n        dist.all_reduce(sums)\n")),
    right(DDP, before("        best = max", "if accuracy > 0.9:", "    break")),
    right(DDP, before("    dist.all_reduce(sums)", "if is_main_process():", "    dist.send(sums, 1)")),
    right(
        DDP,
        before("    dist.all_reduce(sums)", "if is_main_process():", "    dist.barrier(group=others)"),
    ),
    right(DDP, before("        best = max", "if rank == 0:", "    print(model.module(images))")),
    # LS302: reduced by hand; not in the training step
    right(
        DDP,
        ("F.cross_entropy(model(images), labels)", "F.cross_entropy(model.module(images), labels)"),
        before("        optimizer.step()", "for p in model.parameters():", "    dist.all_reduce(p.grad)"),
    ),
    right(
        DDP,
        before("        optimizer.zero_grad()", "with torch.no_grad():", "    print(model.module(images))"),
        ("F.cross_entropy(model(images), labels)", "F.cross_entropy(forward(images), labels)"),
    ),
    # LS309: not in each step
    right(ACCUMULATION, before("        train(model", "dist.barrier()")),
    right(DDP, before("        loss.backward()", "if len(labels) % 100 == 0:", "    dist.barrier()")),
    right(ACCELERATE, *INNER_LOOP, ("K = 4", "K = 1")),
    right(
        ACCELERATE,
        *INNER_LOOP,
        ("                accelerator.back", "                with accelerator.accumulate(model): accelerator.back"),
    ),
    # LS114: a part of the cores; LS217: one batch, or cleared afterwards; LS322: now and then, or after the loop
    right(DDP, ("sampler=sampler)", "sampler=sampler, num_workers=os.cpu_count() // dist.get_world_size())")),
    right(ACCELERATE, *ACCUMULATED, ("steps=4", "steps=1")),
    right(
        ACCELERATE,
        *ACCUMULATED,
        ("                optimizer.zero_grad()\n", ""),
        (
            "                optimizer.step()\n",
            "                optimizer.step()\n                optimizer.zero_grad()\n",
        ),
    ),
    right(
        FLAT,
        ("torch.cuda.set_device(", EVALUATE + "torch.cuda.set_device("),
        (
            "        total += loss.detach()\n",
            "        total += loss.detach()\n        if len(labels) < 64:\n            evaluate(model, test_loader)\n",
        ),
    ),
    right(
        FLAT,
        ("torch.cuda.set_device(", EVALUATE + "torch.cuda.set_device("),
        ("    dist.all_reduce(total)\n", "    dist.all_reduce(total)\n    evaluate(model, test_loader)\n"),
    ),
    right(
        FLAT,
        ("torch.cuda.set_device(", EVALUATE + "torch.cuda.set_device("),
        (
            "        total += loss.detach()\n",
            "        total += loss.detach()\n        if len(labels) == 64:\n            continue\n"
            "        evaluate(model, test_loader)\n",
        ),
    ),
    right(
        FLAT,
        ("torch.cuda.set_device(", EVALUATE.replace("evaluate", "look") + "torch.cuda.set_device("),
        ("        total += loss.detach()\n", "        total += loss.detach()\n        look(model, test_loader)\n"),
    ),
    right(
        DDP,
        before("    start, best", *"if world_size == 1:|    DataLoader(None, num_workers=os.cpu_count())".split("|")),
    ),
    right(SPAWN, before("    world_size = torch", "DataLoader(None, num_workers=os.cpu_count())")),
    right(
        ACCELERATE,
        *INNER_LOOP,
        ("images), labels))\n", "images), labels))\n                optimizer.step()\n"),
    ),
    # LS318, LS319
    right(SPAWN, ("model.to(rank), device_ids=[rank]", "model.cuda()")),
    right(
        SPAWN,
        ("DDP(model.to(rank), device_ids=[rank])", "model.to(rank)"),
        ("model.module.state", "model.state"),
        before("        self.optimizer.step()", "for p in self.model.parameters():", "    dist.all_reduce(p.grad)"),
    ),
    right(DDP, before("    dist.init", 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus')),
    right(DDP, ("import torch\n", 'import torch\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "0,1"\n')),
    right(SPAWN, ("import torch\n", 'import torch\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n')),
    # LS321: used where it was made; tested; made by all; the others go another path
    right(DDP, before("    start, best", "if rank == 0:", "    writer = 1", "if rank == 0:", "    print(writer)")),
    right(DDP, before("    start, best", "writer = None", "if rank == 0:", "    writer = 1", "print(writer)")),
    right(DDP, before("    dist.destroy", "if rank == 0:", "    end = 1", "if rank != 0:", "    return", "print(end)")),
    right(ACCELERATE, *MADE_ON_RANK_0, ("class Average:", "class Average(Base):")),
    right(ACCELERATE, *MADE_ON_RANK_0, ("def load", "def report")),
    right(
        DDP,
        before(
            "def main():",
            "@rank_zero_only",
            "def look():",
            "    path = 1",
            "    print(path)",
            "    print(1 if path else 2)",
            "",
            "",
        ),
    ),
    # LS401: a log that goes on; an object that one rank makes; a call that does not save
    right(DDP, before("    start, best", 'log.addHandler(logging.FileHandler("run.log"))')),
    right(DDP, before("    start, best", "if rank == 0:", '    log.addHandler(logging.FileHandler("run.log", "w"))')),
    right(
        DDP,
        (SAVE, SAVE.replace("if is_main_process():", "if True:").replace("torch.save(state", "saver.save(state")),
        before("    start, best", "saver = Nothing()", "if rank == 0:", "    saver = Saver()"),
        ("\n\ndef train_one", SAVER + "\n\ndef train_one"),
    ),
    # LS401: a buffer; a name by rank; an early return; a decorator; a dictionary's rank; the caller asks
    right(DDP, (SAVE, SAVE_BY_ALL.replace('"checkpoint.pt"', "io.BytesIO()"))),
    right(DDP, (SAVE, SAVE_BY_ALL.replace('"checkpoint.pt"', 'f"checkpoint-{rank}.pt"'))),
    right(DDP, (SAVE, "        if rank != 0:\n            continue\n" + SAVE_BY_ALL)),
    right(
        SPAWN,
        ("            if self.rank == 0:\n                self", "            self"),
        before("    def save(", "@rank_zero_only"),
    ),
    right(HOROVOD, ("hvd.rank() == 0:", "args['local_rank'] in (-1, 0):")),
    right(HOROVOD, ("hvd.rank() == 0:", "not hvd.rank():")),
    # LS401: one process, by Fabric or by DataParallel; a class that asks first
    right(
        ACCELERATE,
        ("Accelerator()", 'Fabric(accelerator="cuda", devices=1)'),
        ("from accelerate import Accelerator", "from lightning.fabric import Fabric"),
        ("        if accelerator.is_main_process:\n            torch", "        torch"),
    ),
    right(DDP, (SAVE, SAVE.replace("if is_main_process():", "if isinstance(model, nn.DataParallel):"))),
    right(
        SPAWN,
        ("            if self.rank == 0:\n                self", "            self"),
        ("\n\ndef run(", ASKS_FIRST + "\n\ndef run("),
    ),
    # LS402: weights to begin with; the other case has it
    right(DDP, ('torch.load("checkpoint.pt", map_location="cpu")', 'torch.load("pretrained.pt")')),
    right(
        DDP,
        before("        start = ", "if not torch.cuda.is_available():", '    checkpoint = torch.load("checkpoint.pt")'),
    ),
    right(
        DDP,
        without(', map_location="cpu"'),
        (
            "        if is_main_process():\n            state",
            "        model.cpu()\n        if is_main_process():\n            state",
        ),
    ),
    # LS406: they wait; LS407, LS409: used; LS410: caught, on one rank, in a tool
    right(
        SPAWN,
        (
            "    trainer.train(10)\n",
            "    trainer.train(10)\n" + ON_RANK_0 + "    dist.barrier()\n    test()\n",
        ),
        ("\n\nclass Trainer", LOADS_THE_END + "\n\nclass Trainer"),
    ),
    right(
        DDP,
        ('start = checkpoint["epoch"] + 1', 'start_epoch = checkpoint["epoch"] + 1'),
        ("range(start, args", "range(start_epoch, args"),
    ),
    right(
        DDP,
        before("    args = parser", 'parser.add_argument("--resume", default="")'),
        ('exists("checkpoint.pt")', "exists(args.resume)"),
    ),
    right(DDP, before("    model.eval()", "if not os.path.exists('out'):", "    os.makedirs('out')")),
    right(DDP, before("    start, best", "if rank == 0 and not os.path.exists('out'):", "    os.makedirs('out')")),
    right(DDP, before("    start, best", "if not os.path.exists('out'):", "    os.makedirs('out', exist_ok=True)")),
    right(
        DDP,
        before(
            "    start, best",
            "if not os.path.exists('out'):",
            "    try:",
            "        os.makedirs('out')",
            "    except OSError:",
            "        pass",
        ),
    ),
    # LS403: unwrapped before; loaded into the wrapper; taken off again
    right(DDP, ('"model": model.module.state', '"model": (model.module if rank >= 0 else model).state')),
    right(DDP, ('"model": model.module.state', '"model": model.state'), ("model.module.load", "model.load")),
    right(
        SPAWN,
        ("self.model.module.state_dict()", "self.model.state_dict()"),
        ("import os\n", 'import os\nP = "module."\n'),
    ),
    # LS404: added later; no state to lose
    right(
        DDP,
        without('                "optimizer": optimizer.state_dict(),\n'),
        before('            torch.save(state, "ch', 'state["optimizer"] = optimizer.state_dict()'),
    ),
    right(
        DDP,
        without('                "optimizer": optimizer.state_dict(),\n'),
        without('        optimizer.load_state_dict(checkpoint["optimizer"])\n'),
        without(", momentum=0.9"),
    ),
]


@pytest.mark.parametrize(
    ("code", "base", "line", "changes"), WRONG, ids=[f"{each[0]}-{n}" for n, each in enumerate(WRONG)]
)
def test_wrong(lint: Lint, code: str, base: str, line: str, changes: tuple[Change, ...]) -> None:
    text = changed(base, changes)
    findings = lint(text)
    assert [each.code for each in findings] == [code]
    assert line in text.splitlines()[findings[0].line - 1]


@pytest.mark.parametrize(("base", "changes"), RIGHT)
def test_right(lint: Lint, base: str, changes: tuple[Change, ...]) -> None:
    assert lint(changed(base, changes)) == []


@pytest.mark.parametrize("name", bases.BASES)
def test_bases_are_right(lint: Lint, name: str) -> None:
    assert lint(bases.BASES[name]) == []


def test_each_rule_has_a_wrong_script() -> None:
    assert {each[0] for each in WRONG} == set(all_rules())


@pytest.mark.parametrize("code", all_rules())
def test_examples_of_a_page(code: str) -> None:
    rule = all_rules()[code]
    for example in (rule.wrong, rule.right):
        compile(example, code, "exec")
    assert rule.wrong != rule.right
    assert len(rule.paragraphs) >= 2


@pytest.mark.parametrize("page", ["docs/lint.md", "docs/zh/lint.md"])
def test_page_lists_the_rules(page: str) -> None:
    path = Path(__file__).parents[3] / page
    if not path.exists():
        pytest.skip("this is not a checkout of the whole repository")
    text = path.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| LS")]
    assert [row.split()[1] for row in rows] == list(all_rules())
    for row, rule in zip(rows, all_rules().values(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[0] == rule.code
        if page == "docs/lint.md":
            assert cells[1:] == [rule.title, rule.result]
