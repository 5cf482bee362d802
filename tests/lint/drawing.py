"""Orders, splits and masks that ranks draw: (code, wrong, right), the lines of main() that make `train` and a model."""

DRAWN = """\
import pandas as pd
import timm
import torchvision
import ignite.utils
from accelerate.utils import set_seed
from sklearn.model_selection import KFold, train_test_split
LAYERS = {"drop": nn.Dropout}
class Rows(Dataset):
    def __init__(self, rows, seed=None):
        self.rows = list(rows)
        if seed is not None:
            random.Random(seed).shuffle(self.rows)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.rows[i]
class Mixed(Rows):
    def __init__(self, rows):
        self.rows = list(rows)
        random.shuffle(self.rows)
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 2)
    def forward(self, x):
        return self.fc(x) * x.new_empty(len(x), 1).bernoulli_(0.9)
def halves(data, generator=None):
    order = torch.randperm(len(data), generator=generator)
    return Subset(data, order[:50]), Subset(data, order[50:])
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data, rest = make(64), None
    seed = 0
    train, net = data, nn.Linear(10, 2)
    BODY
    sampler = DistributedSampler(train, seed=seed)
    loader = DataLoader(train, 64 // world, sampler=sampler)
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    dist.destroy_process_group()
main()
"""
APART, ALIKE = "torch.manual_seed(1 + rank); ", "torch.manual_seed(1); "

DRAWING: list[tuple[str, str, str]] = [
    (
        "LS212",
        "order = np.random.permutation(len(data)); train = Subset(data, order[:50])",
        "order = np.random.default_rng(0).permutation(len(data)); train = Subset(data, order[:50])",
    ),
    (
        "LS212",
        "order = list(range(64)); random.shuffle(order); train = Subset(data, order[:50])",
        "random.seed(2); order = list(range(64)); random.shuffle(order); train = Subset(data, order[:50])",
    ),
    (
        "LS212",
        "kept, rest = train_test_split(list(range(64))); train = Rows(kept)",
        "kept, rest = train_test_split(list(range(64)), random_state=0); train = Rows(kept)",
    ),
    ("LS212", "train = Mixed(range(64))", "train = Rows(range(64), seed=3)"),
    (
        "LS212",
        "train, rest = random_split(data, [50, 14], generator=torch.Generator().manual_seed(rank))",
        "train, rest = random_split(data, [50, 14], generator=torch.Generator().manual_seed(7))",
    ),
    (
        "LS212",
        "train, rest = random_split(data, [50, 14])\n    torch.manual_seed(0)",
        "torch.manual_seed(0); train, rest = random_split(data, [50, 14])",
    ),
    ("LS212", APART + "seed = rank", APART + "seed = 3"),
    ("LS212", APART + "seed = random.randint(0, 99)", "random.seed(1); seed = random.randint(0, 99)"),
    (
        "LS212",
        "df = pd.read_csv('x.csv').sample(frac=1); train = Rows(df.values[:50])",
        "df = pd.read_csv('x.csv').sample(frac=1, random_state=4); train = Rows(df.values[:50])",
    ),
    (
        "LS212",
        "part, rest = next(KFold(5, shuffle=True).split(range(64))); train = Subset(data, part)",
        "part, rest = next(KFold(5).split(range(64))); train = Subset(data, part)",
    ),
    (
        "LS212",
        APART + "train, rest = halves(data, torch.Generator().manual_seed(rank))",
        APART + "train, rest = halves(data, generator=torch.Generator().manual_seed(0))",
    ),
    (
        "LS212",
        "order = np.random.permutation(64); train = Subset(data, order[:50])",
        "order = torch.randperm(64); dist.broadcast(order, 0); train = Subset(data, order[:50])",
    ),
    (
        "LS212",
        "train = Rows(np.random.permutation(64))",
        "for seeder in (np.random.seed, random.seed):\n        seeder(1)\n    train = Rows(np.random.permutation(64))",
    ),
    ("LS211", "set_seed(seed=1); net = nn.Dropout()", "set_seed(seed=1 + rank); net = nn.Dropout()"),
    (
        "LS211",
        "ignite.utils.manual_seed(1); net = nn.Dropout()",
        "ignite.utils.manual_seed(1 + rank); net = nn.Dropout()",
    ),
    (
        "LS211",
        ALIKE + "net = timm.create_model('vit', drop_path_rate=0.1)",
        ALIKE + "net = timm.create_model('vit', drop_path_rate=0.0)",
    ),
    (
        "LS211",
        ALIKE + "net = torchvision.models.get_model('efficientnet_b0')",
        ALIKE + "net = torchvision.models.get_model('resnet18')",
    ),
    (
        "LS211",
        ALIKE + "net = torchvision.models.densenet121(drop_rate=0.2)",
        ALIKE + "net = torchvision.models.densenet121()",
    ),
    ("LS211", ALIKE + "net = Masked()", "gpu = int(os.environ['GPU']); torch.manual_seed(gpu); net = Masked()"),
    ("LS211", ALIKE + "net = nn.Sequential(LAYERS['drop'](0.5))", APART + "net = nn.Sequential(LAYERS['drop'](0.5))"),
]
