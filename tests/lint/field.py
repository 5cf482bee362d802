"""What real code does, cut down to a few lines and told in other words: (codes, files of a program).

Each stands for a false alarm that lint gave on code of others, or for a fault beside one, which has to stay found.
The first file is the one that is checked; a file's text without imports gets those of shapes.BEFORE.
"""

LOOP = """\
def fit(loader, model, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
"""
SAVER = """\
import torch
import torch.distributed as dist
def on_first():
    return not dist.is_initialized() or dist.get_rank() == 0
def keep(*args, **kwargs):
    if on_first():
        torch.save(*args, **kwargs)
def begin():
    dist.init_process_group("nccl")
    dist.destroy_process_group()
"""
RESUMED = """\
from util import keep
def main(args):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make(64), batch_size=8, shuffle=True)
    start = 0
    if args.resume:
        ck = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ck["model"]); start = ck["epoch"] + 1
        opt.load_state_dict(ck["optimizer"])
    for epoch in range(start, 3):
        fit(loader, model, opt)
        keep(STATE, "last.pt")
"""
WHOLE = '{"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch}'
SETS = """\
import torchvision
def folder(train):
    return torchvision.datasets.ImageFolder("train" if train else "val")
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train_set, val_set = folder(True), folder(VAL)
    loader = DataLoader(train_set, batch_size=8, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=8)
    fit(loader, model, opt)
    model.eval()
    with torch.no_grad():
        print(sum((model(x).argmax(1) == y).sum() for x, y in val_loader))
main()
"""
SCALED = """\
class Scaler:
    def __call__(self, loss, opt):
        loss.backward()
        opt.step()
def main():
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    loss_scaler = Scaler()
    data = make(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        SET
        total = torch.zeros(1)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss_scaler(loss, opt)
            total += loss.detach()
        dist.all_reduce(total)
        print(total)
    dist.destroy_process_group()
main()
"""
GROUPS = """\
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(70), batch_size=8, shuffle=True)
    updates = len(loader) // k
    for i, (x, y) in enumerate(loader):
        part = i // k
        LEAVE
        loss = F.cross_entropy(model(x), y)
        DIVIDE
        loss.backward()
        if (i + 1) % k == 0:
            opt.step(); opt.zero_grad()
main(4)
"""
LEAVE, DIVIDE = "if part >= updates:\n            continue", "loss /= k"
RESTORED = """\
def from_checkpoint(path, found, **parts):
    ck = torch.load(path, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(ck[name])
    found["epoch"] = ck["epoch"]
def main():
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)
    data = make(64); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    found = {"epoch": 0}
    from_checkpoint("last.pt", found, model=model, optimizer=opt)
    start = found["epoch"]
    for epoch in range(start, 3):
        sampler.set_epoch(epoch)
        fit(loader, model, opt)
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch + 1}, "last.pt")
    dist.destroy_process_group()
main()
"""
FROZEN = """\
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10); self.fc = nn.Linear(10, 2)
    def forward(self, x):
        return self.fc(self.norm(x))
def learn(loader, model, opt):
    MODE
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
def judge(loader, model):
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum() for x, y in loader)
def main():
    model = Deep(); opt = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    loader, other = DataLoader(make(64), batch_size=8, shuffle=True), DataLoader(make(16), batch_size=8)
    for epoch in range(3):
        learn(loader, model, opt)
        print(judge(other, model))
main()
"""
OPTION = """\
import argparse
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    USE
    dist.destroy_process_group()
main()
"""
LOADED = """\
def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(Net().cuda())
    LOAD
    dist.destroy_process_group()
main()
"""
STOPPED = """\
import math
def main():
    model = Net().cuda(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(make(64), batch_size=8, shuffle=True):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        value = loss.item()
        CHECK
        opt.zero_grad(); loss.backward(); opt.step()
main()
"""
BANK = """\
def NAME(loader, model):
    memory = torch.zeros(64, 2); place = 0
    with torch.no_grad():
        for x, _ in loader:
            memory[place : place + len(x)] = model(x)
            place += len(x)
    return memory
def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Sequential(nn.Linear(10, 2), nn.BatchNorm1d(2)))
    data = make(64)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    print(NAME(loader, model).shape)
    dist.destroy_process_group()
main()
"""
PICKLED = """\
import pickle
def main(model):
    with open(PATH, "rb") as file:
        found = pickle.load(file)
    return found
main(Net())
"""
GPU = """\
class Work:
    def __init__(self, model, gpu_id):
        self.gpu_id = gpu_id
        self.model = DDP(model)
    def keep(self):
        torch.save(self.model.module.state_dict(), "last.pt")
    def run(self):
        if WHEN:
            self.keep()
def start(gpu_id, world):
    dist.init_process_group("gloo", rank=gpu_id, world_size=world)
    Work(Net(), gpu_id).run()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(start, args=(2,), nprocs=2)
"""
CLIPS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets.samplers import DistributedSampler, RandomClipSampler
def main():
    data = TensorDataset(torch.zeros(64, 10))
    sampler = DistributedSampler(RandomClipSampler(data, 5))
    return DataLoader(data, batch_size=8, sampler=sampler)
main()
"""


def _of(codes: str, text: str, **others: str) -> tuple[str, dict[str, str]]:
    return codes, {"train": LOOP + text, **others}


FIELD: list[tuple[str, dict[str, str]]] = [
    _of("", RESUMED.replace("STATE", WHOLE), util=SAVER),
    _of("LS404", RESUMED.replace("STATE", '{"model": model.state_dict(), "epoch": epoch}'), util=SAVER),
    # the group of a helper file is begun by nobody: one process, which may save
    _of("", RESUMED.replace("keep(STATE", f"torch.save({WHOLE}"), util=SAVER),
    _of("", SETS.replace("VAL", "False")),
    _of("LS106", SETS.replace("VAL", "True")),
    _of("", SCALED.replace("SET", "sampler.set_epoch(epoch)")),
    _of("LS101", SCALED.replace("SET", "pass")),
    _of("", GROUPS.replace("LEAVE", LEAVE).replace("DIVIDE", DIVIDE)),
    _of("LS202", GROUPS.replace("LEAVE", "pass").replace("DIVIDE", DIVIDE)),
    _of("LS201", GROUPS.replace("LEAVE", LEAVE).replace("DIVIDE", "loss += 0")),
    _of("", RESTORED),
    _of("LS407", RESTORED.replace("range(start, 3)", "range(3)")),
    _of("", FROZEN.replace("MODE", "model.eval()")),
    _of("LS215", FROZEN.replace("MODE", "pass")),
    _of("", OPTION.replace("USE", "pass")),
    _of("LS304", OPTION.replace("USE", "print(args.local_rank)")),
    _of("LS402", LOADED.replace("LOAD", 'model.load_state_dict(torch.load("last.pt"))')),
    _of("", LOADED.replace("LOAD", 'queue = torch.load(f"queue-{rank}.pt")')),
    _of("", LOADED.replace("LOAD", 'data, _ = torch.load("cache.pt", weights_only=False)')),
    _of("", LOADED.replace("LOAD", 'torch.load("last.pt") if rank == 0 else None')),
    _of("", STOPPED.replace("CHECK", "if not math.isfinite(value):\n            break")),
    _of("LS310", STOPPED.replace("CHECK", "print(value)")),
    _of("", BANK.replace("NAME", "fill_memory")),
    _of("LS104 LS214", BANK.replace("NAME", "evaluate")),
    _of("LS405", PICKLED.replace("PATH", '"words.pkl"')),
    _of("LS405", PICKLED.replace("PATH", '"checkpoint.pkl"')),
    _of("", GPU.replace("WHEN", "self.gpu_id == 0")),
    _of("LS401", GPU.replace("WHEN", "True")),
    ("", {"train": CLIPS}),
]
