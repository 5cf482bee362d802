"""Who reads what in which order: samplers, epochs, workers' seeds, pixels: (codes, files), as in field.py."""

from tests.lint.field import LOOP

BEGIN = """\
import itertools, functools
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
data, other = make(64), make(32)
"""
TWO = (
    BEGIN
    + """\
first, second = DistributedSampler(data), DistributedSampler(other)
one = DataLoader(data, batch_size=8, sampler=first)
two = DataLoader(other, batch_size=8, sampler=second)
def endless(loader, order):
    turn = 0
    while True:
        TELL
        turn += 1
        yield from loader
stream = endless(two, second)
for epoch in range(3):
    FIRST
    for (x, y), (a, b) in zip(one, stream):
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(a), b)
        opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
"""
)
PLACED = (
    BEGIN
    + """\
order = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=order)
BEFORE
for epoch in range(3):
    WITHIN
    fit(loader, model, opt)
dist.destroy_process_group()
"""
)
STEPS = (
    BEGIN
    + """\
order = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=order)
batches = iter(loader); turn = 0
for step in range(1000):
    try:
        x, y = next(batches)
    except StopIteration:
        TELL
        batches = iter(loader)
        x, y = next(batches)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
"""
)
HOOKED = (
    """\
class TellEpoch:
    def before(self, loop):
        loop.loader.sampler.set_epoch(loop.epoch)
class Loop:
    def __init__(self, loader, hooks):
        self.loader, self.hooks, self.epoch = loader, hooks, 0
    def run(self, model, opt):
        while self.epoch < 3:
            for hook in self.hooks:
                hook.before(self)
            fit(self.loader, model, opt)
            self.epoch += 1
"""
    + BEGIN
    + """\
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
Loop(loader, [HOOKS]).run(model, opt)
dist.destroy_process_group()
"""
)
OWN_ORDER = (
    """\
class Shares(torch.utils.data.Sampler):
    def __init__(self, size, rank, world, seed):
        self.size, self.rank, self.world, self.seed, self.turn = size, rank, world, seed, 0
    def tell(self, turn):
        self.turn = turn
    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(SEED)
        return iter(torch.randperm(self.size, generator=generator).tolist()[self.rank :: self.world])
"""
    + BEGIN
    + """\
order = Shares(64, rank, world, 0)
loader = DataLoader(data, batch_size=8, sampler=order)
for epoch in range(3):
    order.tell(epoch)
    fit(loader, model, opt)
dist.destroy_process_group()
"""
)


def _of(codes: str, text: str, **parts: str) -> tuple[str, dict[str, str]]:
    for name, part in parts.items():
        assert name in text
        text = text.replace(name, part)
    return codes, {"train": LOOP + text}


SEEDED = (
    """\
from torchvision import transforms
FLIP = transforms.RandomHorizontalFlip()
def everything(seed):
    random.seed(seed); np.random.seed(seed)
START
"""
    + BEGIN
    + """\
order = DistributedSampler(data)
draws = torch.Generator()
draws.manual_seed(DRAW)
settings = {"num_workers": COUNT, "generator": draws}
loader = DataLoader(data, batch_size=8, sampler=order, worker_init_fn=FUNCTION, **settings)
for epoch in range(3):
    order.set_epoch(epoch)
    fit(loader, model, opt)
dist.destroy_process_group()
"""
)
NOISY = """\
class Noisy(Dataset):
    def __init__(self, seed):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        rng = DRAWS
        return torch.tensor(rng.normal(size=10), dtype=torch.float32), index % 2
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    both = torch.utils.data.ConcatDataset([Noisy(3), make(8)])
    loader = DataLoader(both, batch_size=8, shuffle=True, num_workers=COUNT)
    for epoch in range(3):
        fit(loader, model, opt)
main()
"""
INFO = "def start(worker):\n    everything(torch.utils.data.get_worker_info()."


def _seeded(
    codes: str, start: str = "", draw: str = "rank", count: str = "2", function: str = "None"
) -> tuple[str, dict[str, str]]:
    return _of(codes, SEEDED, START=start, DRAW=draw, COUNT=count, FUNCTION=function)


PIXELS = """\
import torchvision
from torchvision import transforms
from torchvision.transforms import v2
import torchvision.transforms.functional as TF
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
def chain(augment):
    steps = [transforms.RandomHorizontalFlip()] if augment else []
    steps += [transforms.ToTensor()]
    STEPS
    return transforms.Compose(steps)
class Whole(Dataset):
    def __init__(self, base):
        self.base = base
    def __len__(self):
        return len(self.base)
    def __getitem__(self, index):
        image, label = self.base[index]
        return SAMPLE, label
def together(samples):
    images = torch.stack([image for image, _ in samples])
    return BATCH, torch.tensor([label for _, label in samples])
class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", mean); self.register_buffer("std", std)
    def forward(self, x):
        return self.inner(ENTRY)
on_gpu = v2.Compose([v2.RandomErasing(), GPU])
def main():
    model = Scaled(torchvision.models.resnet18()); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Whole(torchvision.datasets.CIFAR10("data", transform=chain(True)))
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=together)
    model.train()
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(on_gpu(x)), y).backward(); opt.step()
main()
"""
ONCE = {
    "STEPS": "steps.append(transforms.Normalize(MEAN, STD))",
    "SAMPLE": "image",
    "BATCH": "images",
    "ENTRY": "x",
    "GPU": "v2.RandomHorizontalFlip()",
}
ELSEWHERE = {  # a second way beside the transform's
    "STEPS": "steps.extend([transforms.Normalize(MEAN, STD), transforms.Normalize(MEAN, STD)])",
    "SAMPLE": "TF.normalize(image, MEAN, STD)",
    "BATCH": "(images - mean) / std",
    "ENTRY": "(x - self.mean) / self.std",
    "GPU": "v2.Normalize(MEAN, STD)",
}


def _pixels() -> list[tuple[str, dict[str, str]]]:
    found = [_of("", PIXELS, **ONCE)]
    for place, second in ELSEWHERE.items():
        found.append(_of("LS111", PIXELS, **{**ONCE, place: second}))
        if place != "STEPS":
            found.append(_of("", PIXELS, **{**ONCE, place: second, "STEPS": "pass"}))
    back = "v2.Normalize([-m / s for m, s in zip(MEAN, STD)], [1 / s for s in STD])"
    return [*found, _of("", PIXELS, **{**ONCE, "GPU": back})]


BESIDE = (
    """\
class Noted(Dataset):
    def __init__(self, base):
        self.base = base
    def __len__(self):
        return len(self.base)
    def __getitem__(self, index):
        return self.base[index]
def build(data, shuffle, order):
    return DataLoader(data, batch_size=8, shuffle=shuffle, sampler=order)
"""
    + BEGIN
    + """\
cut = torch.utils.data.random_split(data, [48, 16], generator=torch.Generator().manual_seed(0))
long, short = cut
sets = {name: make(size) for name, size in (("train", 64), ("test", 32))}
order = DistributedSampler(SAMPLED)
loader = build(READ, SHUFFLE, order)
for epoch in range(3):
    order.set_epoch(epoch)
    fit(loader, model, opt)
dist.destroy_process_group()
"""
)


DIRECT = BESIDE.replace("build(READ, SHUFFLE, order)", "DataLoader(READ, batch_size=8, sampler=order)")


def _beside(
    codes: str, sampled: str = "long", read: str = "long", shuffle: str = "False"
) -> tuple[str, dict[str, str]]:
    return _of(codes, BESIDE, SAMPLED=sampled, READ=read, SHUFFLE=shuffle)


FIRST, TURN = "first.set_epoch(epoch)", "order.set_epoch(turn)"
ORDERS: list[tuple[str, dict[str, str]]] = [
    _of("", TWO, TELL=TURN, FIRST=FIRST),
    _of("LS101", TWO, TELL="pass", FIRST=FIRST),
    _of("LS101", TWO, TELL=TURN, FIRST="pass"),
    _of("", PLACED, BEFORE="pass", WITHIN="order.set_epoch(epoch)"),
    _of("", PLACED, BEFORE="pass", WITHIN="loader.sampler.set_epoch(epoch)"),
    _of("LS101", PLACED, BEFORE="order.set_epoch(0)", WITHIN="pass"),
    _of("LS101", PLACED, BEFORE="pass", WITHIN="order.set_epoch(0)"),
    _of("LS101", PLACED, BEFORE="pass", WITHIN="loader.dataset.set_epoch(epoch)"),
    _of("", STEPS, TELL="turn += 1; order.set_epoch(turn)"),
    _of("LS101", STEPS, TELL="pass"),
    _of("", HOOKED, HOOKS="TellEpoch()"),
    _of("LS101", HOOKED, HOOKS=""),
    _of("", OWN_ORDER, SEED="self.seed + self.turn"),
    _of("LS101", OWN_ORDER, SEED="self.seed"),
    _seeded(""),
    _seeded("LS110", draw="7"),
    _seeded("", draw="7", count="0"),
    _seeded("", draw="7 + world * rank"),
    _seeded("LS110", "def start(worker):\n    everything(3)", function="start"),
    _seeded("", "def start(worker):\n    everything(torch.initial_seed() % 2**32)", function="start"),
    _seeded("", INFO + "seed % 2**32)", function="start"),
    _seeded("LS110", INFO + "id)", function="start"),
    _seeded("", INFO + "id + 64 * dist.get_rank())", function="start"),
    _seeded("LS110", "def start(seed, worker):\n    everything(seed)", function="functools.partial(start, 3)"),
    _seeded("LS110", "def make_start(seed):\n    return lambda worker: np.random.seed(seed)", function="make_start(3)"),
    *_pixels(),
    _beside(""),
    _of("LS102", DIRECT, SAMPLED="short", READ="long"),
    _of("LS102", DIRECT, SAMPLED='sets["test"]', READ='sets["train"]'),
    _of("", DIRECT, SAMPLED='sets["train"]', READ='sets["train"]'),
    _of("", DIRECT, SAMPLED="long", READ="long"),
    _beside("LS103", shuffle="True"),
    _beside("", "data", "Noted(data)"),
    _beside("", 'sets["train"]', 'sets["train"]'),
    _of("LS110", NOISY, DRAWS="self.rng", COUNT="4"),
    _of("", NOISY, DRAWS="self.rng", COUNT="0"),
    _of("", NOISY, DRAWS="np.random.default_rng([self.seed, index])", COUNT="4"),
]
