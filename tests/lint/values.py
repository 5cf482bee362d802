"""Where a value comes from, in the ways in which code hands values on: (codes, files of a program), as in field.py.

Each program is right, or has one fault that shows only where the way is followed.
"""

from tests.lint.field import LOOP

TRAINED = """\
dist.init_process_group("gloo")
model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
HAND
for epoch in range(3):
    TELL
    fit(LOADER, model, opt)
dist.destroy_process_group()
"""
MADE = """\
    data = make(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
"""
IN_DATACLASS = f"""\
from dataclasses import dataclass
@dataclass
class Loaders:
    train: DataLoader
    order: DistributedSampler
def build():
{MADE}    return Loaders(loader, order=sampler)
"""
IN_DICT = f"""\
def build():
    found = {{}}
{MADE}    found["order"] = sampler
    found["train"] = loader
    return found
"""
IN_BASE = """\
class Base:
    def __init__(self):
        self.prepare()
    def prepare(self):
        raise NotImplementedError
    @property
    def train(self):
        return self.loader
class Job(Base):
    def prepare(self):
        data = make(64)
        self.order = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=8, sampler=self.order)
"""
BY_CLASS = """\
from torch.utils.data import DataLoader as Batches
from torch.utils.data.distributed import DistributedSampler as Shares
class Data:
    @staticmethod
    def build():
        data = make(64)
        sampler = Shares(data)
        return Batches(data, batch_size=8, sampler=sampler), sampler
"""
MANAGED = f"""\
from contextlib import contextmanager
from types import SimpleNamespace
@contextmanager
def opened():
{MADE}    yield SimpleNamespace(train=loader, order=sampler)
"""


def _both(before: str, hand: str, loader: str, sampler: str) -> list[tuple[str, dict[str, str]]]:
    text = TRAINED.replace("HAND", hand).replace("LOADER", loader)
    right = text.replace("TELL", f"{sampler}.set_epoch(epoch)")
    return [("", {"train": LOOP + before + right}), ("LS101", {"train": LOOP + before + text.replace("TELL", "pass")})]


VALUES: list[tuple[str, dict[str, str]]] = [
    *_both(IN_DATACLASS, "sets = build()", "sets.train", "sets.order"),
    *_both(IN_DICT, "sets = build()", 'sets["train"]', 'sets["order"]'),
    *_both(IN_BASE, "job = Job()", "job.train", "job.order"),
    *_both(BY_CLASS, "loader, order = Data.build()", "loader", "order"),
    *_both(MANAGED, "with opened() as sets:\n    pass", "sets.train", "sets.order"),
]
