"""Twins about what loaders read: sets handed through helpers, classes, stars and tables; see test_twins.py."""

_TEXT = """\
import argparse, glob
import pandas as pd
from functools import partial
from pathlib import Path
from PIL import Image
from torch.utils.data import Sampler
from torchvision import datasets, transforms as T
DEFS
class Leaf(Dataset):
    def __init__(self, df, tf):
        self.df, self.tf = df, tf
    def __len__(self):
        return len(self.df)
    def __getitem__(self, i):
        return self.tf(Image.open(self.df.path.iloc[i])), self.df.label.iloc[i]
@torch.no_grad()
def evaluate(model, loader):
    model.eval(); sums = torch.zeros(2)
    for x, y in loader:
        sums[0] += (model(x).argmax(1) == y).sum(); sums[1] += len(y)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
def main():
    dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    crop = T.Compose([T.RandomCrop(32), T.ToTensor()])
    tr, va = datasets.CIFAR10("d", transform=crop), datasets.CIFAR10("d", train=False, transform=T.ToTensor())
    val_dl = DataLoader(Subset(va, range(rank, len(va), world)), 8)
BODY
    model = DDP(Deep()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in train_dl:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model.module, val_dl)
        if rank == 0: print(acc)
    dist.destroy_process_group()
main()
"""
_TRAIN = """\
    sampler = DistributedSampler(tr)
    train_dl = DataLoader(tr, 8, sampler=sampler)
"""
_VAL = "    val_dl = DataLoader(Subset(va, range(rank, len(va), world)), 8)\n"


def _program(body: str, defs: str = "") -> str:
    return _TEXT.replace("DEFS\n", defs).replace("BODY\n", body)


_PADDED = """\
    v = DistributedSampler(te, shuffle=False) # wrong
    te = Subset(te, range(dist.get_rank(), len(te), dist.get_world_size())); v = None # right
"""

READS: list[tuple[str, str, str]] = [
    (
        "LS105",
        "a star before, the list handed on",
        _program(
            """\
    *both, sampler = build()
    train_dl, val_dl = both
""",
            f"""\
def build():
    tr, te = datasets.CIFAR10("d"), datasets.CIFAR10("d", train=False)
    s = DistributedSampler(tr)
{_PADDED}    return DataLoader(tr, 8, sampler=s), DataLoader(te, 8, sampler=v), s
""",
        ),
    ),
    (
        "LS105",
        "a star behind, and one in a call",
        _program(
            """\
    sampler, *rest = build()
    train_dl, val_dl = wrap(*rest[:1], *rest[1:]) if world > 99 else wrap(*rest)
""",
            f"""\
def wrap(a, b):
    return a, b
def build():
    tr, te = datasets.CIFAR10("d"), datasets.CIFAR10("d", train=False)
    s = DistributedSampler(tr)
{_PADDED}    return s, DataLoader(tr, 8, sampler=s), DataLoader(te, 8, sampler=v)
""",
        ),
    ),
    (
        "LS105",
        "a sampler of one's own",
        _program(
            _TRAIN + "    val_dl = DataLoader(va, 8, sampler=Whole(va))\n",
            """\
class Whole(DistributedSampler):
    def __init__(self, ds):
        super().__init__(ds, shuffle=False) # wrong
        super().__init__(ds, shuffle=False, drop_last=True) # right
""",
        ),
    ),
    (
        "LS103",
        "one entry or the other",
        _program(
            """\
    kw = {"batch_size": 8}
    sampler = DistributedSampler(tr)
    kw["sampler"] = sampler # wrong
    if world > 1: # right
        kw["sampler"] = sampler # right
    else: # right
        kw["shuffle"] = True # right
    kw["shuffle"] = True # wrong
    train_dl = DataLoader(tr, **kw)
"""
        ),
    ),
    (
        "LS103",
        "equal in both branches",
        _program(
            """\
    if world > 1:
        sampler, shuffle = DistributedSampler(tr), True # wrong
        sampler, shuffle = DistributedSampler(tr), False # right
    else:
        sampler, shuffle = None, True
    train_dl = DataLoader(tr, 8, shuffle=shuffle, sampler=sampler)
"""
        ),
    ),
    (
        "LS106",
        "a folder class of one's own",
        _program(
            f"""\
    root = Path("d")
    tr = Birds(root / "train", crop)
    va = Birds(root / "train", T.ToTensor()) # wrong
    va = Birds(root / "val", T.ToTensor()) # right
{_TRAIN}{_VAL}""",
            """\
class Birds(datasets.ImageFolder):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, int(self.classes[y].split("_")[0])
""",
        ),
    ),
    (
        "LS106",
        "a rank's rows of a frame that may be one of two",
        _program(
            f"""\
    df = pd.read_csv("a.csv")
    if world > 8:
        df = pd.read_csv("b.csv")
    a, b = df[df.fold != 0], df[df.fold == 0]
    tr = Leaf(a, crop)
{_TRAIN}    val_dl = DataLoader(Leaf(a.iloc[rank::world], T.ToTensor()), 8) # wrong
    val_dl = DataLoader(Leaf(b.iloc[rank::world], T.ToTensor()), 8) # right
"""
        ),
    ),
    (
        "LS106",
        "a property",
        _program(
            """\
    data = Data(rank, world)
    train_dl, sampler, val_dl = data.train, data.sampler, data.val
""",
            """\
class Data:
    def __init__(self, rank, world):
        self.a, self.b = datasets.CIFAR10("d"), datasets.CIFAR10("d", train=False)
        self.sampler = DistributedSampler(self.a); self.rank, self.world = rank, world
    @property
    def train(self):
        return DataLoader(self.a, 8, sampler=self.sampler)
    @property
    def val(self):
        return DataLoader(Subset(self.a, range(self.rank, len(self.a), self.world)), 8) # wrong
        return DataLoader(Subset(self.b, range(self.rank, len(self.b), self.world)), 8) # right
""",
        ),
    ),
    (
        "LS107",
        "rows of a frame",
        _program(
            f"""\
    df = pd.read_csv("a.csv").dropna().reset_index(drop=True)
    df = df.iloc[: CFG["rows"]] # wrong
    df = df.sample(CFG["rows"], random_state=0) # right
    tr = Leaf(df, crop)
{_TRAIN}""",
            """\
CFG = {
    "rows": 2000,  # a random part of the images, for quick tries
}
""",
        ),
    ),
    (
        "LS108",
        "a class by its name",
        _program(
            f"    tr = build('CIFAR10')\n{_TRAIN}",
            """\
def build(name):
    kind = getattr(datasets, name)
    return kind("d", download=True) # wrong
    return kind("d") # right
""",
        ),
    ),
    (
        "LS110",
        "a partial of the rank",
        _program(
            """\
    sampler = DistributedSampler(tr)
    start = partial(seed_worker, seed=7) # wrong
    start = partial(seed_worker, seed=7 + 1000 * rank) # right
    train_dl = DataLoader(tr, 8, sampler=sampler, num_workers=4, worker_init_fn=start)
""",
            """\
def seed_worker(worker_id, seed):
    np.random.seed(seed + worker_id)
""",
        ),
    ),
    (
        "LS111",
        "divided in a script that normalises nowhere",
        _program(_TRAIN).replace(
            "            opt.zero_grad()",
            "            x = x.float() / 255 # wrong\n            opt.zero_grad()",
        ),
    ),
]

_FILES = """\
class Files(Dataset):
    def __init__(self, root, tf, held=None):
        files = sorted(glob.glob(root + "/*")); n = int(len(files) * 0.9)
        self.files = files if held is None else files[n:] if held else files[:n]
        self.tf = tf
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.tf(Image.open(self.files[i])), 0
"""

UNALIKE: list[tuple[str, str]] = [
    (
        "parts of an object's list",
        _program(
            f"""\
    tr, va = Files("d", crop), Files("d", T.ToTensor())
    tr.files, va.files = tr.files[1000:], va.files[:1000]
{_TRAIN}{_VAL}""",
            _FILES,
        ),
    ),
    (
        "cut by the class",
        _program(f"    tr, va = Files('d', crop, False), Files('d', T.ToTensor(), True)\n{_TRAIN}{_VAL}", _FILES),
    ),
    (
        "the training samples judged beside others",
        _program(f"""\
    df = pd.read_csv("a.csv")
    tr, clean = Leaf(df, crop), DataLoader(Leaf(df[rank::world], T.ToTensor()), 8)
{_TRAIN}""").replace(
            "if rank == 0: print(acc)", "fit = evaluate(model.module, clean)\n        if rank == 0: print(acc, fit)"
        ),
    ),
    (
        "read by phase",
        _program(
            """\
    train_dl, val_dl = make("train", rank, world), make("val", rank, world)
    sampler = train_dl.sampler
""",
            """\
def read(phase):
    df = pd.read_csv("all.csv")
    if phase == "train":
        df = df[df.fold != 0]
    else:
        df = df[df.fold == 0]
    return df
def make(phase, rank, world):
    df = read(phase)
    if phase == "train":
        ds = Leaf(df, T.Compose([T.RandomCrop(32), T.ToTensor()]))
        return DataLoader(ds, 8, sampler=DistributedSampler(ds))
    return DataLoader(Leaf(df[rank::world], T.ToTensor()), 8)
""",
        ),
    ),
    (
        "rows that were shuffled",
        _program(
            f"""\
    df = pd.read_csv("a.csv").sample(frac=1, random_state=1).reset_index(drop=True)
    tr = Leaf(df.iloc[: CFG["rows"]], crop)
{_TRAIN}""",
            'CFG = {\n    "rows": 2000,  # a random part of the images\n}\n',
        ),
    ),
    (
        "told apart by the command's words",
        _program(f"""\
    tr, va = datasets.ImageFolder(sys.argv[1], crop), datasets.ImageFolder(sys.argv[2], T.ToTensor())
{_TRAIN}{_VAL}""").replace("import argparse", "import sys, argparse"),
    ),
    (
        "folds of a list",
        _program(
            f"""\
    a, b = frames()
    tr, va = Leaf(a, crop), Leaf(b, T.ToTensor())
{_TRAIN}{_VAL}""",
            """\
from sklearn.model_selection import StratifiedKFold
def frames():
    df = pd.read_csv("a.csv")
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(df, df["label"])
    a, b = list(folds)[0]
    return df.iloc[a], df.iloc[b]
""",
        ),
    ),
    (
        "told later which part to show",
        _program(
            f"""\
    tr, va = Half("d", crop, True), Half("d", T.ToTensor(), True)
    va.use(False)
{_TRAIN}{_VAL}""",
            """\
class Half(Dataset):
    def __init__(self, root, tf, first):
        self.files, self.tf, self.first = sorted(glob.glob(root + "/*")), tf, first
    def use(self, first):
        self.first = first
    def __len__(self):
        return len(self.files) // 2
    def __getitem__(self, i):
        return self.tf(Image.open(self.files[2 * i + self.first])), 0
""",
        ),
    ),
    (
        "a flag that chooses in __getitem__",
        _program(
            f"    tr, va = Half('d', True), Half('d', False)\n{_TRAIN}{_VAL}",
            """\
class Half(Dataset):
    def __init__(self, root, train):
        self.files, self.train = sorted(glob.glob(root + "/*")), train
    def __len__(self):
        return len(self.files) // 2
    def __getitem__(self, i):
        if self.train:
            i = 2 * i
        else:
            i = 2 * i + 1
        return T.ToTensor()(Image.open(self.files[i])), 0
""",
        ),
    ),
    (
        "one folder after the other",
        _program(f"""\
    roots = ["a", "b"] if world > 1 else ["c", "d"]
    tr, va = datasets.ImageFolder(roots.pop(), crop), datasets.ImageFolder(roots.pop(), T.ToTensor())
{_TRAIN}{_VAL}"""),
    ),
]
