"""What loaders read, in further shapes: (name, code, program with @@, the wrong piece, the right one)."""

CASES: list[tuple[str, str, str, str | None, str]] = []


def add(name: str, code: str, text: str, wrong: str | None, right: str) -> None:
    CASES.append((name, code, text, wrong, right))


RANKS = """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
"""
add(
    "dict of loaders",
    "LS101",
    """
def main():"""
    + RANKS
    + """
    sets = {"train": make(64), "val": make(32)}
    samplers = {k: DistributedSampler(v, shuffle=k == "train") for k, v in sets.items()}
    loaders = {k: DataLoader(v, batch_size=8, sampler=samplers[k]) for k, v in sets.items()}
    for epoch in range(5):
        @@
        model.train()
        for x, y in loaders["train"]:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
""",
    "pass",
    'samplers["train"].set_epoch(epoch)',
)
add(
    "under rank",
    "LS101",
    """
def main():"""
    + RANKS
    + """
    ds = make(64)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    for epoch in range(5):
        if @@:
            print("epoch", epoch)
            sampler.set_epoch(epoch)
        else:
            pass
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
""",
    "rank == 0",
    "world > 1",
)
add(
    "callback never runs",
    "LS101",
    """
class Hook:
    def before_epoch(self, run): ...
class Reshuffle(Hook):
    def __init__(self, sampler): self.sampler = sampler
    def @@(self, run): self.sampler.set_epoch(run.epoch)
class Run:
    def __init__(self, model, feed, opt, hooks):
        self.model, self.feed, self.opt, self.hooks, self.epoch = model, feed, opt, hooks, 0
    def fire(self, name):
        for hook in self.hooks: getattr(hook, name)(self)
    def go(self):
        while self.epoch < 5:
            self.fire("before_epoch")
            for x, y in self.feed:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
            self.epoch += 1
def main():"""
    + RANKS
    + """
    ds = make(64); sampler = DistributedSampler(ds)
    Run(model, DataLoader(ds, batch_size=8, sampler=sampler), opt, [Reshuffle(sampler)]).go()
    dist.destroy_process_group()
main()
""",
    "on_epoch_start",
    "before_epoch",
)

EPOCHS = """
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
"""
add(
    "helper make_loader",
    "LS102",
    """
def make_loader(ds, sampler, bs):
    return DataLoader(ds, batch_size=bs, sampler=sampler, num_workers=2)
def main():"""
    + RANKS
    + """
    train_ds, val_ds = datasets.MNIST("d", train=True), datasets.MNIST("d", train=False)
    sampler, val_sampler = DistributedSampler(train_ds), DistributedSampler(val_ds, shuffle=False)
    loader = make_loader(train_ds, @@, 8)
    for x, y in make_loader(val_ds, val_sampler, 8): pass
"""
    + EPOCHS,
    "val_sampler",
    "sampler",
)
add(
    "same set, other transform",
    "LS102",
    """
def main():"""
    + RANKS
    + """
    plain = datasets.CIFAR10("d", train=True, transform=transforms.ToTensor())
    aug = datasets.CIFAR10("d", train=True, transform=transforms.RandomCrop(32))
    @@
    loader = DataLoader(aug, batch_size=8, sampler=sampler)
"""
    + EPOCHS,
    "sampler = DistributedSampler(datasets.CIFAR10('d', train=False))",
    "sampler = DistributedSampler(plain)",
)
add(
    "subset random sampler over subset",
    "LS102",
    """
from torch.utils.data import SubsetRandomSampler
def main():
    full = datasets.ImageFolder("d")
    idx = np.random.permutation(len(full)); train_idx, val_idx = idx[1000:], idx[:1000]
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train_ds = Subset(full, train_idx)
    loader = DataLoader(@@, batch_size=8, sampler=SubsetRandomSampler(train_idx))
    for epoch in range(5):
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
""",
    "train_ds",
    "full",
)

GO = """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    ds = datasets.MNIST("d", train=True)
"""
add(
    "kwargs update",
    "LS103",
    "def main():"
    + GO
    + """
    kw = {"batch_size": 8}
    kw.update(num_workers=1, pin_memory=True, shuffle=@@)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, sampler=sampler, **kw)
"""
    + EPOCHS,
    "True",
    "False",
)
add(
    "kwargs setitem",
    "LS103",
    "def main():"
    + GO
    + """
    kw = dict(batch_size=8)
    sampler = DistributedSampler(ds)
    kw["sampler"] = sampler
    kw["shuffle"] = @@
    loader = DataLoader(ds, **kw)
"""
    + EPOCHS,
    "True",
    "False",
)
add(
    "not none wrong sense",
    "LS103",
    "def main():"
    + GO
    + """
    sampler = DistributedSampler(ds) if world > 1 else None
    loader = DataLoader(ds, batch_size=8, sampler=sampler, shuffle=@@)
    for epoch in range(5):
        if sampler is not None: sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
""",
    "sampler is not None",
    "(sampler is None)",
)
add(
    "bool of sampler",
    "LS103",
    "def main():"
    + GO
    + """
    sampler = DistributedSampler(ds)
    shuffle = @@
    loader = DataLoader(ds, batch_size=8, sampler=sampler, shuffle=shuffle)
"""
    + EPOCHS,
    "bool(sampler)",
    "not sampler",
)
add(
    "split compare",
    "LS103",
    """
def build(split):
    ds = datasets.SVHN("d", split=split)
    return DataLoader(ds, batch_size=8, sampler=DistributedSampler(ds), shuffle=@@)
def main():"""
    + GO
    + """
    loader = build("train"); sampler = loader.sampler
"""
    + EPOCHS,
    'split == "train"',
    'split != "train"',
)
add(
    "subclass loader",
    "LS103",
    """
class FastLoader(DataLoader):
    def __init__(self, dataset, sampler, bs):
        super().__init__(dataset, batch_size=bs, sampler=sampler, shuffle=@@, pin_memory=True)
def main():"""
    + GO
    + """
    sampler = DistributedSampler(ds)
    loader = FastLoader(ds, sampler, 8)
"""
    + EPOCHS,
    "True",
    "False",
)

GO = """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    train_ds, test_ds = datasets.MNIST("d", train=True), datasets.MNIST("d", train=False)
    sampler = DistributedSampler(train_ds); loader = DataLoader(train_ds, batch_size=8, sampler=sampler)
    def one(epoch):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    shard = Subset(test_ds, range(rank, len(test_ds), world))
"""
END = """
    dist.destroy_process_group()
main()
"""
add(
    "torchmetrics dist_sync_fn/compute_with",
    "LS104",
    """
from torchmetrics import Accuracy
class Evaluator:
    def __init__(self, model, feed):
        self.model, self.feed = model, feed
        self.metric = Accuracy(task="multiclass", num_classes=2@@)
    @torch.no_grad()
    def __call__(self):
        self.model.eval(); self.metric.reset()
        for x, y in self.feed: self.metric(self.model(x), y)
        return self.metric.compute()
def main():"""
    + GO
    + """
    ev = Evaluator(model.module, DataLoader(shard, batch_size=100))
    for e in range(3):
        one(e)
        a = ev()
        if rank == 0: print("accuracy", a.item())
"""
    + END,
    ", sync_on_compute=False",
    "",
)
add(
    "own sampler class",
    "LS104",
    """
class EvalShard(torch.utils.data.Sampler):
    def __init__(self, ds):
        self.idx = range(dist.get_rank(), len(ds), dist.get_world_size())
    def __iter__(self): return iter(self.idx)
    def __len__(self): return len(self.idx)
def main():"""
    + GO
    + """
    test_dl = DataLoader(test_ds, batch_size=100, sampler=EvalShard(test_ds))
    for e in range(3):
        one(e)
        model.eval(); c = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_dl:
                c[0] += (model.module(x).argmax(1) == y).sum(); c[1] += len(y)
        @@
        if rank == 0: print("acc", (c[0] / c[1]).item())
"""
    + END,
    "pass",
    "dist.all_reduce(c)",
)
add(
    "factory none for eval",
    "LS104",
    """
def make_loader(ds, train):
    if train: s = DistributedSampler(ds)
    else: s = @@
    return DataLoader(ds, batch_size=8, sampler=s, shuffle=False), s
def evaluate(model, dl):
    model.eval(); c = torch.zeros(2)
    with torch.no_grad():
        for x, y in dl:
            c[0] += (model(x).argmax(1) == y).sum(); c[1] += len(y)
    return (c[0] / c[1]).item()
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    loader, sampler = make_loader(datasets.MNIST("d", train=True), True)
    test_dl, _ = make_loader(datasets.MNIST("d", train=False), False)
    for e in range(3):
        sampler.set_epoch(e); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        a = evaluate(model.module, test_dl)
        if rank == 0: print("acc", a)
"""
    + END,
    "range(dist.get_rank(), len(ds), dist.get_world_size())",
    "None",
)
add(
    "factory ternary",
    "LS104",
    """
def make_loader(ds, train, shard=True):
    s = DistributedSampler(ds, shuffle=train) if shard else None
    return DataLoader(ds, batch_size=8, sampler=s), s
def evaluate(model, dl):
    model.eval(); c = torch.zeros(2)
    with torch.no_grad():
        for x, y in dl:
            c[0] += (model(x).argmax(1) == y).sum(); c[1] += len(y)
    return (c[0] / c[1]).item()
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    loader, sampler = make_loader(datasets.MNIST("d", train=True), True)
    test_dl, _ = make_loader(datasets.MNIST("d", train=False), False, shard=@@)
    for e in range(3):
        sampler.set_epoch(e); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        a = evaluate(model.module, test_dl)
        if rank == 0: print("acc", a)
"""
    + END,
    "True",
    "False",
)
add(
    "model by its module",
    "LS104",
    """
class Engine:
    def __init__(self, net, feeds): self.net, self.feeds = net, feeds
    def judge(self):
        plain = self.net.module
        plain.eval(); c = torch.zeros(2)
        with torch.no_grad():
            for x, y in self.feeds["val"]:
                c[0] += (plain(x).argmax(1) == y).sum(); c[1] += len(y)
        @@
        return (c[0] / c[1]).item()
def main():"""
    + GO
    + """
    engine = Engine(model, {"val": DataLoader(shard, batch_size=100)})
    for e in range(3):
        one(e); acc = engine.judge()
        if rank == 0: print("acc", acc)
"""
    + END,
    "pass",
    "dist.all_reduce(c)",
)

GO = """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    train_ds, test_ds = datasets.MNIST("d", train=True), datasets.MNIST("d", train=False)
    sampler = DistributedSampler(train_ds); loader = DataLoader(train_ds, batch_size=8, sampler=sampler)
    def one(epoch):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
"""
W, R = "DistributedSampler(test_ds, shuffle=False)", "range(rank, len(test_ds), world)"
add(
    "function with flag",
    "LS105",
    """
def make_loader(ds, train):
    if train: s = DistributedSampler(ds)
    else: s = @@
    return DataLoader(ds, batch_size=8, sampler=s)
def evaluate(model, dl):
    model.eval(); c = torch.zeros(2)
    with torch.no_grad():
        for x, y in dl:
            c[0] += (model(x).argmax(1) == y).sum(); c[1] += len(y)
    dist.all_reduce(c)
    return (c[0] / c[1]).item()
def main():"""
    + GO
    + """
    test_dl = make_loader(test_ds, False)
    for e in range(3):
        one(e)
        a = evaluate(model.module, test_dl)
        if rank == 0: print("acc", a)
"""
    + END,
    "DistributedSampler(ds, shuffle=False)",
    "range(dist.get_rank(), len(ds), dist.get_world_size())",
)
add(
    "inherited sampler",
    "LS105",
    """
class Seq(DistributedSampler):
    def __init__(self, ds): super().__init__(ds, shuffle=False)
def main():"""
    + GO
    + """
    test_dl = DataLoader(test_ds, batch_size=100, sampler=@@)
    for e in range(3):
        one(e); model.eval(); c = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_dl:
                c[0] += (model.module(x).argmax(1) == y).sum(); c[1] += len(y)
        dist.all_reduce(c)
        if rank == 0: print("acc", (c[0] / c[1]).item())
"""
    + END,
    "Seq(test_ds)",
    R,
)

SCORED = """
    torch.manual_seed(0)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def one(loader):
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    @torch.no_grad()
    def score(loader):
        model.eval(); ok = n = 0
        for x, y in loader:
            ok += (model(x).argmax(1) == y).sum().item(); n += len(y)
        return ok / n
"""
add(
    "loop keys",
    "LS106",
    "def main():"
    + SCORED
    + """
    loaders = {}
    for phase in ("train", "test"):
        ds = datasets.MNIST("d", train=@@)
        loaders[phase] = DataLoader(ds, batch_size=8, shuffle=phase == "train")
    for e in range(3):
        one(loaders["train"]); print("test accuracy", score(loaders["test"]))
main()
""",
    "True",
    'phase == "train"',
)
add(
    "swap return",
    "LS106",
    """
def split(ds):
    n = int(0.8 * len(ds))
    return random_split(ds, [n, len(ds) - n], generator=torch.Generator().manual_seed(0))
def main():"""
    + SCORED
    + """
    full = datasets.ImageFolder("d")
    tr, va = split(full)
    train_dl = DataLoader(@@, batch_size=8, shuffle=True); val_dl = DataLoader(va, batch_size=8)
    for e in range(3):
        one(train_dl); print("val accuracy", score(val_dl))
main()
""",
    "full",
    "tr",
)
add(
    "kfold",
    "LS106",
    """
from sklearn.model_selection import KFold
def main():"""
    + SCORED
    + """
    full = datasets.ImageFolder("d")
    for fold, (tr, va) in enumerate(KFold(5, shuffle=True).split(range(len(full)))):
        train_dl = DataLoader(Subset(full, tr), batch_size=8, shuffle=True)
        val_dl = DataLoader(Subset(full, @@), batch_size=8)
        for e in range(3):
            one(train_dl); print("val accuracy", score(val_dl))
main()
""",
    "tr",
    "va",
)
add(
    "lightning trainer.test",
    "LS106",
    """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self): super().__init__(); self.net = Net()
    def training_step(self, b, i): return F.cross_entropy(self.net(b[0]), b[1])
    def test_step(self, b, i): self.log("acc", (self.net(b[0]).argmax(1) == b[1]).float().mean(), sync_dist=True)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
def main():
    tr, te = datasets.MNIST("d", train=True), datasets.MNIST("d", train=False)
    train_dl, test_dl = DataLoader(tr, batch_size=8, shuffle=True), DataLoader(te, batch_size=8)
    t = L.Trainer(max_epochs=2, devices=1)
    lit = Lit(); t.fit(lit, train_dl); t.test(lit, @@)
main()
""",
    "train_dl",
    "test_dl",
)
add(
    "printed as test",
    "LS106",
    """
def main():"""
    + SCORED
    + """
    learn, exam = datasets.DTD("d", split="train"), datasets.DTD("d", split=@@)
    learn_dl, exam_dl = DataLoader(learn, batch_size=8, shuffle=True), DataLoader(exam, batch_size=8)
    for e in range(3): one(learn_dl)
    print(f"test {score(exam_dl):.4f}")
main()
""",
    '"train"',
    '"test"',
)

ALONE = """
    torch.manual_seed(0)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def one(loader):
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
"""
add(
    "folder split np",
    "LS107",
    "def main():"
    + ALONE
    + """
    ds = datasets.ImageFolder("d")
    idx = np.arange(len(ds))
    @@
    cut = int(0.9 * len(ds))
    tr_idx, va_idx = np.split(idx, [cut])
    train_dl = DataLoader(Subset(ds, tr_idx), batch_size=8, shuffle=True)
    for e in range(3): one(train_dl)
main()
""",
    "pass",
    "np.random.default_rng(0).shuffle(idx)",
)
add(
    "sklearn no shuffle",
    "LS107",
    """
from sklearn.model_selection import train_test_split
def main():"""
    + ALONE
    + """
    ds = datasets.ImageFolder("d")
    tr, va = train_test_split(list(range(len(ds))), test_size=0.1@@)
    train_dl = DataLoader(Subset(ds, tr), batch_size=8, shuffle=True)
    for e in range(3): one(train_dl)
main()
""",
    ", shuffle=False",
    ", random_state=0",
)
add(
    "kfold no shuffle",
    "LS107",
    """
from sklearn.model_selection import KFold
def main():"""
    + ALONE
    + """
    ds = datasets.ImageFolder("d")
    for tr, va in KFold(5@@).split(range(len(ds))):
        train_dl = DataLoader(Subset(ds, tr), batch_size=8, shuffle=True)
        for e in range(3): one(train_dl)
main()
""",
    "",
    ", shuffle=True, random_state=0",
)
add(
    "local split",
    "LS107",
    """
def split_indices(n, val_pct, seed):
    n_val = int(n * val_pct)
    idxs = @@
    return idxs[n_val:], idxs[:n_val]
def main():"""
    + ALONE
    + """
    ds = datasets.ImageFolder("d")
    tr, va = split_indices(len(ds), 0.2, 42)
    train_dl = DataLoader(Subset(ds, tr), batch_size=8, shuffle=True)
    for e in range(3): one(train_dl)
main()
""",
    "np.arange(n)",
    "np.random.default_rng(seed).permutation(n)",
)
add(
    "argparse seed",
    "LS107",
    """
def main():"""
    + ALONE
    + """
    p = argparse.ArgumentParser()
    p.add_argument("--subset", type=float, default=1.0, help="fraction of the training images, drawn at random")
    p.add_argument("--subset-seed", type=int, default=0)
    args = p.parse_args()
    ds = datasets.CIFAR10("d", train=True)
    if args.subset < 1:
        n = int(args.subset * len(ds))
        @@
    train_dl = DataLoader(ds, batch_size=8, shuffle=True)
    for e in range(3): one(train_dl)
main()
""",
    "ds = Subset(ds, list(range(n)))",
    """g = torch.Generator().manual_seed(args.subset_seed)
        ds = Subset(ds, torch.randperm(len(ds), generator=g)[:n].tolist())""",
)
add(
    "random probe",
    "LS107",
    """
class CFG:
    probe = 2000  # training images, drawn at random, to see how far they are fitted
def main():"""
    + ALONE
    + """
    ds = datasets.CIFAR10("d", train=True)
    part, rest = random_split(ds, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    numbers = @@
    probe_dl = DataLoader(Subset(ds, numbers[0::2]), batch_size=8)
    train_dl = DataLoader(part, batch_size=8, shuffle=True)
    for e in range(3): one(train_dl)
    model.eval()
    with torch.no_grad(): print(sum((model(x).argmax(1) == y).sum() for x, y in probe_dl))
main()
""",
    "sorted(part.indices)[:CFG.probe]",
    "random.sample(part.indices, CFG.probe)",
)
add(
    "part of a folder by rank",
    "LS107",
    """
def main():
    dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size(); torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    train_ds = datasets.ImageFolder("d/train"); ds = datasets.ImageFolder("d/val")
    order = @@
    k = len(order) // 4
    held, kept = order[:k], order[k:]
    val_dl = DataLoader(Subset(ds, held[rank::world]), batch_size=8)
    s = DistributedSampler(train_ds); train_dl = DataLoader(train_ds, batch_size=8, sampler=s)
    for e in range(3):
        s.set_epoch(e); model.train()
        for x, y in train_dl:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval(); c = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_dl:
                c[0] += (model.module(x).argmax(1) == y).sum(); c[1] += len(y)
        dist.all_reduce(c)
        if rank == 0: print("acc", (c[0] / c[1]).item())
    dist.destroy_process_group()
main()
""",
    "list(range(len(ds)))",
    "torch.randperm(len(ds), generator=torch.Generator().manual_seed(0)).tolist()",
)

LOOP = """
    sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
"""
add(
    "flag through args",
    "LS108",
    "def main():"
    + RANKS
    + """
    p = argparse.ArgumentParser(); p.add_argument("--download", action="store_true", default=@@); a = p.parse_args()
    ds = datasets.CIFAR10("d", train=True, download=a.download)
"""
    + LOOP,
    "True",
    "False",
)
add(
    "guard without barrier",
    "LS108",
    "def main():"
    + RANKS
    + """
    download = @@
    ds = datasets.CIFAR10("d", train=True, download=download)
"""
    + LOOP,
    "not os.path.exists('d/cifar')",
    "False",
)
add(
    "hub",
    "LS108",
    "def main():"
    + RANKS
    + """
    ds = make(64)
    @@
    net = torch.hub.load("pytorch/vision", "resnet18", pretrained=True)
    model = DDP(net)
"""
    + LOOP,
    "pass",
    """if rank == 0: torch.hub.load("pytorch/vision", "resnet18", pretrained=True)
    dist.barrier()""",
)
add(
    "getattr models",
    "LS108",
    "def main():"
    + RANKS
    + """
    ds = make(64); arch = "resnet18"
    @@
    net = getattr(models, arch)(weights="DEFAULT")
    model = DDP(net)
"""
    + LOOP,
    "pass",
    """if rank == 0: getattr(models, arch)(weights="DEFAULT")
    dist.barrier()""",
)
add(
    "device index",
    "LS108",
    "def main():"
    + RANKS
    + """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    @@
    dist.barrier()
    ds = datasets.GTSRB("d", split="train")
"""
    + LOOP,
    'datasets.GTSRB("d", download=True)',
    'if device.index == 0: datasets.GTSRB("d", download=True)',
)
add(
    "weights by a name",
    "LS108",
    "def main():"
    + RANKS
    + """
    ds = make(64)
    weights = models.ResNet18_Weights.IMAGENET1K_V1
    @@
    model = DDP(models.resnet18(weights=weights))
"""
    + LOOP,
    "pass",
    """if rank == 0: weights.get_state_dict(progress=False)
    dist.barrier()""",
)
add(
    "no wait behind the first",
    "LS108",
    "def main():"
    + RANKS
    + """
    if rank == 0:
        datasets.CIFAR10("d", train=True, download=True)
    @@
    ds = datasets.CIFAR10("d", train=True, download=True)
"""
    + LOOP,
    "pass",
    "dist.barrier()",
)

GO = """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=LR)
    ds = datasets.CIFAR10("d", train=True)
    sampler = DistributedSampler(ds)
"""
PRE = "LR = 0.1  # for the global batch\n"
add(
    "comment above",
    "LS109",
    PRE
    + """
# total batch size, summed over all processes
BATCH_SIZE = 256
def main():"""
    + GO
    + """
    loader = DataLoader(ds, batch_size=@@, sampler=sampler)
"""
    + EPOCHS,
    "BATCH_SIZE",
    "BATCH_SIZE // world",
)
add(
    "param doc",
    "LS109",
    PRE
    + """
def make_loader(ds, sampler, batch_size):
    '''batch_size: images in one step over all processes together'''
    return DataLoader(ds, batch_size=@@, sampler=sampler)
def main():"""
    + GO
    + """
    loader = make_loader(ds, sampler, 256)
"""
    + EPOCHS,
    "batch_size",
    "batch_size // dist.get_world_size()",
)
add(
    "batch times",
    "LS109",
    PRE
    + "def main():"
    + GO
    + """
    per_gpu = 32
    total = per_gpu * world
    if rank == 0: print("total batch", total)
    loader = DataLoader(ds, batch_size=@@, sampler=sampler)
"""
    + EPOCHS,
    "total",
    "per_gpu",
)
add(
    "batch sampler",
    "LS109",
    PRE
    + """
from torch.utils.data import BatchSampler
GLOBAL_BATCH = 256
def main():"""
    + GO
    + """
    loader = DataLoader(ds, batch_sampler=BatchSampler(sampler, @@, drop_last=True))
"""
    + EPOCHS,
    "GLOBAL_BATCH",
    "GLOBAL_BATCH // world",
)

PRE = """
SEED = 3
class Noisy(Dataset):
    def __init__(self): self.x = torch.zeros(64, 10)
    def __len__(self): return 64
    def __getitem__(self, i):
        return self.x[i] + np.random.randn(10), 0
"""
GO = """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    ds = Noisy(); sampler = DistributedSampler(ds)
"""
add(
    "method",
    "LS110",
    PRE
    + """
class Data:
    seed = 5
    def _init(self, wid):
        np.random.seed(@@)
    def loader(self, ds, sampler):
        return DataLoader(ds, batch_size=8, sampler=sampler, num_workers=4, worker_init_fn=self._init)
def main():"""
    + GO
    + """
    loader = Data().loader(ds, sampler)
"""
    + EPOCHS,
    "self.seed",
    "(torch.initial_seed() + self.seed) % 2**32",
)

ST = "MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)\n"
TF = """tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    ds = datasets.CIFAR10('d', train=True, transform=tf)
    loader = DataLoader(ds, batch_size=8, shuffle=True)
"""
add(
    "gpu batch",
    "LS111",
    ST
    + "def main():"
    + ALONE
    + "    "
    + TF
    + """
    m, s = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    for e in range(3):
        for x, y in loader:
            @@
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
""",
    "x = (x - m) / s",
    "x = x * 1.0",
)
add(
    "in place two statements",
    "LS111",
    ST
    + "def main():"
    + ALONE
    + "    "
    + TF
    + """
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    for e in range(3):
        for x, y in loader:
            @@
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
""",
    "x -= mean; x /= std",
    "x = x.float()",
)
add(
    "two statements 2",
    "LS111",
    ST
    + """
def preprocess(batch, mean, std):
    x, y = batch
    @@
    return x, y
def main():"""
    + ALONE
    + "    "
    + TF
    + """
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    for e in range(3):
        for batch in loader:
            x, y = preprocess(batch, mean, std)
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
""",
    "x = x - mean\n    x = x / std",
    "x = x.float()",
)
add(
    "model layer",
    "LS111",
    ST
    + """
class NormLayer(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
    def forward(self, x): return (x - self.mean) / self.std
def main():"""
    + ALONE
    + "    "
    + TF
    + """
    model = @@
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for e in range(3):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
""",
    "nn.Sequential(NormLayer(MEAN, STD), models.resnet18())",
    "models.resnet18()",
)
add(
    "scale twice",
    "LS111",
    ST
    + "def main():"
    + ALONE
    + "    "
    + TF
    + """
    for e in range(3):
        for x, y in loader:
            x = @@
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
""",
    "x / 255.0",
    "x",
)
add(
    "forward of lightning",
    "LS111",
    ST
    + """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self): super().__init__(); self.net = Net(); self.mean, self.std = MEAN, STD
    def forward(self, x):
        mean, std = x.new_tensor(self.mean).view(1, 3, 1, 1), x.new_tensor(self.std).view(1, 3, 1, 1)
        return self.net(@@)
    def training_step(self, b, i): return F.cross_entropy(self(b[0]), b[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
def main():
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    loader = DataLoader(datasets.CIFAR10("d", transform=tf), batch_size=8, shuffle=True)
    L.Trainer(max_epochs=2, devices=1).fit(Lit(), loader)
main()
""",
    "(x - mean) / std",
    "x",
)

add(
    "cv then final",
    "LS106",
    """
from sklearn.model_selection import KFold
def main():"""
    + SCORED
    + """
    full = datasets.ImageFolder("d")
    for tr, va in KFold(5, shuffle=True, random_state=0).split(range(len(full))):
        one(DataLoader(Subset(full, tr), batch_size=8, shuffle=True))
        print("val accuracy", score(DataLoader(Subset(full, va), batch_size=8)))
    one(DataLoader(full, batch_size=8, shuffle=True))
main()
""",
    None,
    "",
)
add(
    "folder shuffled by sort key",
    "LS107",
    "def main():"
    + SCORED
    + """
    ds = datasets.ImageFolder("d")
    numbers = sorted(range(len(ds)), key=lambda i: hash(ds.samples[i][0]))
    tr = DataLoader(Subset(ds, numbers[100:]), batch_size=8, shuffle=True)
    for e in range(3): one(tr)
main()
""",
    None,
    "",
)
add(
    "targets normalised",
    "LS111",
    "def main():"
    + SCORED
    + """
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    ages = torch.rand(100); m, s = ages.mean(), ages.std()
    for x, y in DataLoader(datasets.CIFAR10("d", transform=tf), batch_size=8, shuffle=True):
        y = (y - m) / s
        opt.zero_grad(); F.mse_loss(model(x), y).backward(); opt.step()
main()
""",
    None,
    "",
)
