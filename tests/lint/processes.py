"""How processes begin, meet, take a device and end, in the ways in which code says it: (codes, files of a program)."""

RANKED = """\
from dataclasses import dataclass
@dataclass
class Env:
    rank: int
    here: int
    @classmethod
    def read(cls):
        env = os.environ
        return cls(int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]))
    @property
    def device(self):
        return torch.device("cuda", self.here)
def begin():
    dist.init_process_group("nccl")
    return dist.get_rank(), int(os.environ["LOCAL_RANK"])
def main():
    env = Env.read()
    rank, here = begin()
    named = {"all": int(os.environ["RANK"]), "here": here}
    model = Net()
    TAKE
    dist.destroy_process_group()
main()
"""
NODES = """\
def work(gpu, args):
    rank = args.node * args.gpus + gpu
    dist.init_process_group("nccl", rank=rank, world_size=args.world)
    DDP(Net().cuda(NUMBER))
    dist.destroy_process_group()
def main(args):
    mp.spawn(work, args=(args,), nprocs=args.gpus)
"""
ONE_MACHINE = """\
def work(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(dist.get_rank())
    DDP(Net().cuda())
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""
ENDED = """\
class Run:
    def __init__(self):
        dist.init_process_group("gloo")
        self.log = open("log", "w")
    def fit(self):
        DDP(Net())
        self.log.close()
    def close(self):  # destroy_process_group
        WHAT
if __name__ == "__main__":
    run = Run()
    run.fit()
    THEN
"""
ORDER = """\
from contextlib import contextmanager
@contextmanager
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
def first():
    return dist.get_rank() == 0
def asked():
    if not dist.is_initialized():
        return True
    return first()
def told(text):
    if ASK():
        print(text)
def main():
    BEFORE
    with group():
        told("now")
        DDP(Net())
if __name__ == "__main__":
    main()
"""
INHERITED = """\
class Base:
    def __init__(self):
        dist.init_process_group("gloo")
    def close(self):
        dist.destroy_process_group()
class Run(Base):
    def __init__(self):
        FIRST
        THEN
        DDP(Net())
if __name__ == "__main__":
    Run().close()
"""
PARENT = """\
def work(rank, n):
    dist.init_process_group("gloo", rank=rank, world_size=n)
    DDP(Net())
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=COUNT)
"""
FLAT = """\
def judge(model, loader, device):
    model.eval(); good = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            right = model(x.to(device)).argmax(1) == y.to(device)
            good += torch.stack([right.sum(), torch.tensor(len(y), device=device)])
    every = torch.zeros(2 * dist.get_world_size(), device=device)
    ASKED
        dist.all_gather_single(every, good)
    right, seen = SHOWN
    return right / seen
def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    test = make(64)
    loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    accuracy = judge(DDP(Net().to(device)), loader, device)
    if dist.get_rank() == 0:
        print("accuracy", accuracy)
    dist.destroy_process_group()
main()
"""


def _of(codes: str, text: str, *pairs: str, **others: str) -> tuple[str, dict[str, str]]:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return codes, {"train": text, **others}


TAKES = [
    ("env.rank", "env.here", "torch.cuda.set_device({})"),
    ("rank", "here", "model.to({})"),
    ("rank", "rank % torch.cuda.device_count()", 'model.to("cuda:%d" % ({}))'),
    ('named["all"]', 'named["here"]', 'model.to("cuda:{{}}".format({}))'),
    ("rank", "here", 'torch.load("a.pt", map_location=f"cuda:{{{}}}", weights_only=True)'),
    ("rank", "here", 'os.environ["CUDA_VISIBLE_DEVICES"] = str({})'),
]
PROCESSES: list[tuple[str, dict[str, str]]] = [
    *(_of("LS303", RANKED, "TAKE", take.format(wrong)) for wrong, _, take in TAKES),
    _of("", RANKED, "TAKE", "\n    ".join(take.format(right) for _, right, take in TAKES)),
    _of("LS303", RANKED, "self.here", "self.rank", "TAKE", "model.to(env.device)"),
    _of("LS303", NODES, "NUMBER", "rank"),
    _of("", NODES, "NUMBER", "gpu"),
    _of("", ONE_MACHINE),
    _of("LS306", ENDED, "WHAT", "pass", "THEN", "run.close()"),
    _of("LS306", ENDED, "WHAT", "dist.destroy_process_group()", "THEN", "pass"),
    _of(
        "LS306",
        ENDED,
        "WHAT",
        "dist.get_rank() == 0 and None\n        if dist.get_rank() == 0:\n            dist.destroy_process_group()",
        "THEN",
        "run.close()",
    ),
    _of("", ENDED, "WHAT", "dist.destroy_process_group()", "THEN", "run.close()"),
    _of("LS307", ORDER, "ASK", "first", "BEFORE", 'told("soon")'),
    _of("", ORDER, "ASK", "asked", "BEFORE", 'told("soon")'),
    _of("", ORDER, "ASK", "first", "BEFORE", "pass"),
    _of("LS307", ORDER, "ASK", "first", "BEFORE", "DistributedSampler(make(8))"),
    _of("LS307", INHERITED, "FIRST", "self.rank = dist.get_rank()", "THEN", "super().__init__()"),
    _of("", INHERITED, "FIRST", "super().__init__()", "THEN", "self.rank = dist.get_rank()"),
    _of("LS307", PARENT, "COUNT", "dist.get_world_size()"),
    _of("", PARENT, "COUNT", "2"),
    _of("LS105 LS308", FLAT, "ASKED", "if dist.get_rank() == 0:", "SHOWN", "every.view(-1, 2).sum(0).tolist()"),
    _of("LS105 LS204", FLAT, "ASKED", "if True:", "SHOWN", "good.tolist()"),
    _of("LS105", FLAT, "ASKED", "if True:", "SHOWN", "every.view(-1, 2).sum(0).tolist()"),
]
