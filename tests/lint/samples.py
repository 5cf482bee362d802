"""Sets that loops read, in shapes of real code: (name, code, program with @@ in it, the wrong piece, the right one)."""

MAIN = """
def fit(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
def evaluate(model, loader):
    model.eval(); n = ok = 0
    with torch.no_grad():
        for x, y in loader:
            ok += (model(x).argmax(1) == y).sum().item(); n += len(y)
    return ok / n
"""
RUN = """
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        fit(model, TRAIN, opt)
        print("accuracy", evaluate(model, TEST))
main()
"""
CASES: list[tuple[str, str, str, str | None, str]] = []


def go(train: str, test: str) -> str:
    return RUN.replace("TRAIN", train).replace("TEST", test)


def add(name: str, text: str, wrong: str | None, right: str) -> None:
    CASES.append((name, "LS106", text, wrong, right))


add(
    "svhn split",
    MAIN
    + """
def main():
    train = datasets.SVHN("d", split="train", transform=transforms.ToTensor())
    test = datasets.SVHN("d", split=@@, transform=transforms.ToTensor())
    train_dl = DataLoader(train, batch_size=8, shuffle=True)
    test_dl = DataLoader(test, batch_size=8)
"""
    + go("train_dl", "test_dl"),
    '"train"',
    '"test"',
)
add(
    "factory flag",
    MAIN
    + """
def build(train, bs):
    ds = datasets.CIFAR10("d", train=train, transform=transforms.ToTensor())
    return DataLoader(ds, batch_size=bs, shuffle=train)
def main():
    train_dl = build(True, 8)
    test_dl = build(@@, 16)
"""
    + go("train_dl", "test_dl"),
    "True",
    "False",
)
add(
    "factory kw",
    MAIN
    + """
def get_loader(root, split, bs):
    ds = datasets.ImageFolder(os.path.join(root, split), transforms.ToTensor())
    return DataLoader(ds, batch_size=bs, shuffle=split == "train")
def main():
    train_loader = get_loader("d", "train", 8)
    val_loader = get_loader("d", @@, 16)
"""
    + go("train_loader", "val_loader"),
    '"train"',
    '"val"',
)
add(
    "dict",
    MAIN
    + """
def main():
    sets = {"train": datasets.CIFAR10("d", train=True), "val": datasets.CIFAR10("d", train=@@)}
    loaders = {k: DataLoader(v, batch_size=8, shuffle=k == "train") for k, v in sets.items()}
"""
    + go('loaders["train"]', 'loaders["val"]'),
    "True",
    "False",
)
add(
    "dict2",
    MAIN
    + """
def main():
    train_set = datasets.CIFAR10("d", train=True); test_set = datasets.CIFAR10("d", train=False)
    loaders = {"train": DataLoader(train_set, batch_size=8, shuffle=True), "test": DataLoader(@@, batch_size=8)}
"""
    + go('loaders["train"]', 'loaders["test"]'),
    "train_set",
    "test_set",
)
add(
    "tuple return",
    MAIN
    + """
def build():
    a = datasets.CIFAR10("d", train=True); b = datasets.CIFAR10("d", train=False)
    return DataLoader(a, batch_size=8, shuffle=True), DataLoader(@@, batch_size=8)
def main():
    train_dl, test_dl = build()
"""
    + go("train_dl", "test_dl"),
    "a",
    "b",
)
add(
    "random split",
    MAIN
    + """
def main():
    full = datasets.CIFAR10("d", train=True)
    train_part, val_part = random_split(full, [45000, 5000], generator=torch.Generator().manual_seed(0))
    train_dl = DataLoader(train_part, batch_size=8, shuffle=True)
    val_dl = DataLoader(@@, batch_size=8)
"""
    + go("train_dl", "val_dl"),
    "train_part",
    "val_part",
)
add(
    "random split, whole",
    MAIN
    + """
def main():
    full = datasets.CIFAR10("d", train=True)
    train_part, val_part = random_split(full, [45000, 5000], generator=torch.Generator().manual_seed(0))
    train_dl = DataLoader(train_part, batch_size=8, shuffle=True)
    val_dl = DataLoader(@@, batch_size=8)
"""
    + go("train_dl", "val_dl"),
    "full",
    "val_part",
)
add(
    "called with",
    MAIN
    + """
def main():
    train_dl = DataLoader(datasets.CIFAR10("d", train=True), batch_size=8, shuffle=True)
    test_dl = DataLoader(datasets.CIFAR10("d", train=False), batch_size=8)
"""
    + go("train_dl", "@@"),
    "train_dl",
    "test_dl",
)
add(
    "class",
    """
class Trainer:
    def __init__(self, model, train_data, test_data):
        self.model, self.train_data, self.test_data = model, train_data, test_data
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def loader(self, data, shuffle):
        return DataLoader(data, batch_size=8, shuffle=shuffle)
    def fit(self):
        self.model.train()
        for x, y in self.loader(self.train_data, True):
            self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
    def validate(self):
        self.model.eval(); ok = n = 0
        with torch.no_grad():
            for x, y in self.loader(self.@@_data, False):
                ok += (self.model(x).argmax(1) == y).sum().item(); n += len(y)
        print("test accuracy", ok / n)
def main():
    t = Trainer(Net(), datasets.CIFAR10("d", train=True), datasets.CIFAR10("d", train=False))
    for e in range(3):
        t.fit(); t.validate()
main()
""",
    "train",
    "test",
)
add(
    "datamodule",
    """
import lightning.pytorch as pl
class Data(pl.LightningDataModule):
    def setup(self, stage=None):
        full = datasets.MNIST("d", train=True, transform=transforms.ToTensor())
        self.fit_part, self.held = random_split(full, [55000, 5000], generator=torch.Generator().manual_seed(0))
    def train_dataloader(self):
        return DataLoader(self.fit_part, batch_size=8, shuffle=True)
    def val_dataloader(self):
        return DataLoader(self.@@, batch_size=8)
""",
    "fit_part",
    "held",
)
add(
    "samplers",
    MAIN
    + """
from torch.utils.data import SubsetRandomSampler
def main():
    full = datasets.CIFAR10("d", train=True)
    order = np.random.RandomState(0).permutation(len(full))
    train_idx, val_idx = order[5000:], order[:5000]
    train_dl = DataLoader(full, batch_size=8, sampler=SubsetRandomSampler(train_idx))
    val_dl = DataLoader(full, batch_size=8, sampler=SubsetRandomSampler(@@))
"""
    + go("train_dl", "val_dl"),
    "train_idx",
    "val_idx",
)
add(
    "subset idx",
    MAIN
    + """
def main():
    full = datasets.CIFAR10("d", train=True); plain = datasets.CIFAR10("d", train=True, transform=transforms.ToTensor())
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(0)).tolist()
    train_idx, val_idx = order[5000:], order[:5000]
    train_dl = DataLoader(Subset(full, train_idx), batch_size=8, shuffle=True)
    val_dl = DataLoader(Subset(plain, @@), batch_size=8)
"""
    + go("train_dl", "val_dl"),
    "train_idx",
    "val_idx",
)
add(
    "folder",
    MAIN
    + """
def main(args):
    traindir = os.path.join(args.data, "train"); valdir = os.path.join(args.data, "val")
    train_dataset = datasets.ImageFolder(traindir, transforms.ToTensor())
    val_dataset = datasets.ImageFolder(@@, transforms.ToTensor())
    train_loader = DataLoader(train_dataset, batch_size=8, shuffle=True)
    val_loader = DataLoader(val_dataset, batch_size=8)
"""
    + go("train_loader", "val_loader").replace("main()\n", "main(argparse.ArgumentParser().parse_args())\n"),
    "traindir",
    "valdir",
)
add(
    "cfg folder",
    MAIN
    + """
class CFG:
    train_dir = "data/train"
    val_dir = "data/val"
def main():
    tr = DataLoader(datasets.ImageFolder(CFG.train_dir, transforms.ToTensor()), batch_size=8, shuffle=True)
    va = DataLoader(datasets.ImageFolder(CFG.@@, transforms.ToTensor()), batch_size=8)
"""
    + go("tr", "va"),
    "train_dir",
    "val_dir",
)
add(
    "factory set",
    MAIN
    + """
def load(directory, training):
    tf = transforms.ToTensor()
    return datasets.FashionMNIST(directory, train=training, transform=tf)
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); size = dist.get_world_size()
    train_set = load("d", True)
    test_set = load("d", @@)
    train_dl = DataLoader(train_set, batch_size=8, shuffle=True)
    test_dl = DataLoader(Subset(test_set, range(rank, len(test_set), size)), batch_size=8)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, train_dl, opt)
    model.eval(); s = torch.zeros(2)
    for x, y in test_dl:
        s[0] += (model(x).argmax(1) == y).sum(); s[1] += len(y)
    dist.all_reduce(s)
    print(s[0] / s[1])
    dist.destroy_process_group()
main()
""",
    "True",
    "False",
)
add(
    "custom csv",
    MAIN
    + """
import pandas as pd
class Leaves(Dataset):
    def __init__(self, frame): self.frame = frame
    def __len__(self): return len(self.frame)
    def __getitem__(self, i): return self.frame.iloc[i]
def main():
    train_df = pd.read_csv("train.csv"); test_df = pd.read_csv("test.csv")
    train_dl = DataLoader(Leaves(train_df), batch_size=8, shuffle=True)
    test_dl = DataLoader(Leaves(@@), batch_size=8)
"""
    + go("train_dl", "test_dl"),
    "train_df",
    "test_df",
)
add(
    "hf",
    MAIN
    + """
from datasets import load_dataset
def main():
    ds = load_dataset("beans")
    train_dl = DataLoader(ds["train"], batch_size=8, shuffle=True)
    eval_dl = DataLoader(ds[@@], batch_size=8)
"""
    + go("train_dl", "eval_dl"),
    '"train"',
    '"validation"',
)
add(
    "ignite",
    """
from ignite.engine import create_supervised_trainer, create_supervised_evaluator, Events
from ignite.metrics import Accuracy
def main():
    train_loader = DataLoader(datasets.MNIST("d", train=True), batch_size=8, shuffle=True)
    val_loader = DataLoader(datasets.MNIST("d", train=False), batch_size=8)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, opt, F.cross_entropy)
    evaluator = create_supervised_evaluator(model, metrics={"acc": Accuracy()})
    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(@@)
        print("validation", evaluator.state.metrics)
    trainer.run(train_loader, max_epochs=3)
main()
""",
    "train_loader",
    "val_loader",
)
add(
    "lightning fit",
    """
import lightning.pytorch as pl
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, batch, i):
        x, y = batch
        return F.cross_entropy(self.net(x), y)
    def validation_step(self, batch, i):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def main():
    pl.seed_everything(1)
    train_dl = DataLoader(datasets.MNIST("d", train=True), batch_size=8, shuffle=True)
    val_dl = DataLoader(datasets.MNIST("d", train=False), batch_size=8)
    pl.Trainer(max_epochs=3).fit(Lit(), train_dl, @@)
main()
""",
    "train_dl",
    "val_dl",
)
# must stay clean
add(
    "train accuracy too",
    MAIN
    + """
def main():
    train_dl = DataLoader(datasets.CIFAR10("d", train=True), batch_size=8, shuffle=True)
    test_dl = DataLoader(datasets.CIFAR10("d", train=False), batch_size=8)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        fit(model, train_dl, opt)
        print("train", evaluate(model, train_dl), "test", evaluate(model, test_dl))
main()
""",
    None,
    "",
)
add(
    "train eval loader",
    MAIN
    + """
def main():
    train_set = datasets.CIFAR10("d", train=True)
    train_dl = DataLoader(train_set, batch_size=8, shuffle=True)
    train_eval_dl = DataLoader(train_set, batch_size=64)
    test_dl = DataLoader(datasets.CIFAR10("d", train=False), batch_size=8)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        fit(model, train_dl, opt)
        print("train", evaluate(model, train_eval_dl), "test", evaluate(model, test_dl))
main()
""",
    None,
    "",
)
add(
    "only train acc",
    MAIN
    + """
def main():
    train_dl = DataLoader(datasets.CIFAR10("d", train=True), batch_size=8, shuffle=True)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        fit(model, train_dl, opt)
    print("train accuracy", evaluate(model, train_dl))
main()
""",
    None,
    "",
)
add(
    "factory dataset by name",
    MAIN
    + """
def make_set(which):
    if which == "train":
        return datasets.CIFAR10("d", train=True)
    return datasets.CIFAR10("d", train=False)
def main():
    train_dl = DataLoader(make_set("train"), batch_size=8, shuffle=True)
    val_dl = DataLoader(make_set(@@), batch_size=8)
"""
    + go("train_dl", "val_dl"),
    '"train"',
    '"val"',
)
add(
    "cut later by class",
    MAIN
    + """
class Part(Dataset):
    def __init__(self, base, fold, held):
        self.base, self.fold, self.held = base, fold, held
    def __len__(self): return 10
    def __getitem__(self, i): return self.base[i]
def main():
    base = datasets.CIFAR10("d", train=True)
    train_dl = DataLoader(Part(base, 0, False), batch_size=8, shuffle=True)
    val_dl = DataLoader(Part(base, 0, @@), batch_size=8)
"""
    + go("train_dl", "val_dl"),
    "False",
    "True",
)
add(
    "loader in loop",
    MAIN
    + """
def main():
    loaders = []
    for train in (True, False):
        ds = datasets.CIFAR10("d", train=train)
        loaders.append(DataLoader(ds, batch_size=8, shuffle=train))
    train_dl, val_dl = loaders
"""
    + go("train_dl", "val_dl"),
    None,
    "",
)
add(
    "attrs",
    """
class Task:
    def __init__(self, cfg):
        self.cfg = cfg
        self.train_set = datasets.CIFAR10(cfg.root, train=True)
        self.valid_set = datasets.CIFAR10(cfg.root, train=False)
    def train_batches(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)
    def valid_batches(self):
        return DataLoader(self.@@_set, batch_size=8)
    def run(self, model, opt):
        for e in range(2):
            model.train()
            for x, y in self.train_batches():
                opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            model.eval(); ok = n = 0
            for x, y in self.valid_batches():
                with torch.no_grad(): ok += (model(x).argmax(1) == y).sum().item()
                n += len(y)
            print(ok / n)
def main():
    model = Net(); Task(None).run(model, torch.optim.SGD(model.parameters(), lr=0.1))
main()
""",
    "train",
    "valid",
)
