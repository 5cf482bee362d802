"""How processes wrap, meet, begin and end in code of those who never saw the rules: (codes, files of a program).

Each program has its wrong and its right way: «wrong||right».
"""

import re

TWINS = [
    (
        "LS301",
        """\
class Own(DDP):
    pass
def main():
    dist.init_process_group("nccl")
    nets = {"a": Net()«||.cuda()», "b": Net()«||.cuda()»}
    models = {key: Own(each) for key, each in nets.items()}
    for each in models.values():
        each«.cuda()||.train()»
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS301",
        """\
def to_device(model, device):
    return model.to(device)
def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    net = Net()
    «ddp = DDP(net)||net = to_device(net, device)»
    «net.to(device)||ddp = DDP(net)»
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS213",
        """\
class Run:
    def __init__(self, net):
        self.net = net
        «self.wrap()||self.convert()»
        «self.convert()||self.wrap()»
    def wrap(self):
        self.net = DDP(self.net)
    def convert(self):
        self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)
def main():
    dist.init_process_group("gloo")
    Run(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS302",
        """\
def bare(model):
    return model.module if hasattr(model, "module") else model
def main():
    dist.init_process_group("nccl")
    model = DDP(Net().cuda())
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1)
    net = bare(model)
    for x, y in DataLoader(make(8), batch_size=2):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(«net||model»(x), y)
            loss.backward()
            return loss
        opt.step(closure)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS302",
        """\
from accelerate import Accelerator
def main():
    manager = Accelerator()
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp, opt, loader = manager.prepare(net, opt, DataLoader(make(8), batch_size=2, shuffle=True))
    def loss_of(x, y):
        return F.cross_entropy(«net||ddp»(x), y)
    for x, y in loader:
        opt.zero_grad()
        manager.backward(loss_of(x, y))
        opt.step()
main()
""",
    ),
    (
        "LS303",
        """\
def begin():
    dist.init_process_group("nccl")
    return dist.get_rank(), int(os.environ["LOCAL_RANK"])
def main():
    rank, here = begin()
    DDP(Net().to(torch.device(type="cuda", index=«rank||here»)))
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS304",
        """\
import click
@click.command()
«@click.option("--local_rank", "--local-rank", "here", default=0)||@click.option("--seed", "here", default=0)»
def main(here):
    torch.cuda.set_device(«here||int(os.environ["LOCAL_RANK"])»)
    dist.init_process_group("nccl")
    DDP(Net().cuda())
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS305",
        """\
import subprocess, sys
for rank in range(2):
    env = {**os.environ, "RANK": str(rank), "MASTER_PORT": «"29500"||os.environ.get("PORT", "29500")»}
    subprocess.Popen([sys.executable, "train.py"], env=env)
""",
    ),
    (
        "LS305",
        """\
for key, value in (("MASTER_ADDR", «"node01.cluster"||"localhost"»), ("MASTER_PORT", os.environ["PORT"])):
    os.environ[key] = value
dist.init_process_group("gloo")
dist.destroy_process_group()
""",
    ),
    (
        "LS305",
        """\
SET = {"meet": {"addr": "localhost", "port": "«29501||0»"}}
meet = SET["meet"]
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meet["addr"], meet["port"]
dist.init_process_group("gloo")
dist.destroy_process_group()
""",
    ),
    (
        "LS306",
        """\
def main(args):
    dist.init_process_group("gloo")
    try:
        DDP(Net())
    «except KeyboardInterrupt||finally»:
        dist.destroy_process_group()
main(None)
""",
    ),
    (
        "LS306",
        """\
def main(args):
    dist.init_process_group("gloo")
    DDP(Net())
    if args.evaluate:
        print("evaluated")
        «dist.destroy_process_group()||pass»
        return
    print("trained")
    «pass||dist.destroy_process_group()»
main(None)
""",
    ),
    (
        "LS307",
        """\
import click
from dataclasses import dataclass
@dataclass
class Config:
    batch: int = 64
    def __post_init__(self):
        self.batch //= dist.get_world_size()
@click.group()
def cli():
    pass
@cli.command()
def train():
    «config = Config()||dist.init_process_group("gloo")»
    «dist.init_process_group("gloo")||config = Config()»
    DDP(Net())
    dist.destroy_process_group()
if __name__ == "__main__":
    cli()
""",
    ),
    (
        "LS307",
        """\
def main(args):
    if args.distributed:
        «args.rank = dist.get_rank()||dist.init_process_group("gloo")»
        «dist.init_process_group("gloo")||args.rank = dist.get_rank()»
    DDP(Net())
    dist.destroy_process_group()
main(None)
""",
    ),
    (
        "LS308",
        """\
def work(index, n):
    dist.init_process_group("gloo", rank=index, world_size=n)
    x, tries = torch.zeros(1), 0
    log = open("log", "w") if index == 0 else None
    match index:
        case 0:
            «dist.barrier()||print(0)»
    while index == 0 and tries < 3:
        tries += 1
        «dist.all_reduce(x)||print(x)»
    if log is not None:
        «dist.broadcast(x, 0)||print(x, file=log)»
    «index or dist.barrier()||index or print(x)»
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
""",
    ),
    (
        "LS308",
        """\
import torch.distributed.checkpoint as dcp
def main():
    dist.init_process_group("gloo")
    stop = torch.zeros(1)
    for epoch in range(9):
        if dist.get_rank() == 0 and epoch == 4:
            «break||stop += 1»
        dist.broadcast(stop, 0)
        if stop:
            break
    «if dist.get_rank() == 0:||if True:»
        dcp.save({"stop": stop}, checkpoint_id="last")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS309",
        """\
def met(function):
    def inner(*args):
        function(*args)
        «dist.barrier()||pass»
    return inner
@met
def step(model, opt, x, y):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
def batches(loader):
    for batch in loader:
        «dist.barrier()||pass»
        yield batch
def main():
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for x, y in batches(DataLoader(make(8), batch_size=2)):
        step(model, opt, x, y)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS311",
        """\
from contextlib import nullcontext
def main():
    dist.init_process_group("gloo")
    print(np.maximum.accumulate(np.ones(2)))
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    loader = DataLoader(make(8), batch_size=2)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % 4 == 0 or i + 1 == len(loader)
        with «nullcontext()||nullcontext() if last else model.no_sync()»:
            (F.cross_entropy(model(x), y) / 4).backward()
        if last:
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS312",
        """\
from contextlib import nullcontext
def main():
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    loader = DataLoader(make(8), batch_size=2)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % 4 == 0 or i + 1 == len(loader)
        context = nullcontext if last else model.no_sync
        «loss = F.cross_entropy(model(x), y) / 4||pass»
        with context():
            «pass||loss = F.cross_entropy(model(x), y) / 4»
            loss.backward()
        if last:
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS315",
        """\
from torchvision import transforms
class ToGpu:
    def __call__(self, x):
        return x«.cuda()||.float()»
class Kept(Dataset):
    def __init__(self):
        self.x = torch.randn(8, 10)«.to("cuda")||»
        self.change = transforms.Compose([ToGpu()])
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return self.change(self.x[index])
for x in DataLoader(Kept(), batch_size=2, num_workers=2):
    print(x)
""",
    ),
    (
        "LS316",
        """\
def main():
    gpu = torch.cuda.is_available()
    dist.init_process_group(«"nccl"||"nccl" if gpu else "gloo"»)
    here = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", here) if gpu else torch.device("cpu")
    DDP(Net().to(device), device_ids=[here] if gpu else None)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS212",
        """\
from torch.distributed.fsdp import fully_shard
def build(seed):
    torch.manual_seed(seed«+ dist.get_rank()||»)
    net = Net()
    fully_shard(net)
    return net
def main():
    dist.init_process_group("nccl")
    model = build(1); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(make(8), batch_size=2):
        F.cross_entropy(model(x), y).backward()
        opt.step()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS313",
        """\
def main(name):
    dist.init_process_group("gloo")
    DDP({"net": Net}[name](), find_unused_parameters=«True||False»)
    dist.destroy_process_group()
main("net")
""",
    ),
]


def _side(text: str, which: int) -> str:
    return re.sub(r"«(.*?)\|\|(.*?)»", lambda found: found[which], text)


STRANGERS: list[tuple[str, dict[str, str]]] = [
    way for codes, text in TWINS for way in ((codes, {"train": _side(text, 1)}), ("", {"train": _side(text, 2)}))
]
