"""Who starts the processes, where they meet, and with which backend: (codes, files of a program), as in field.py."""

OPTION = """\
import argparse, subprocess, sys
DECLARED
def main(MARK):
    READ
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    DDP(Net().cuda())
    dist.destroy_process_group()
if __name__ == "__main__":
    START
"""
PARSED = """\
parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="LOCAL_RANK")
    args = parser.parse_args()
    local_rank = args.local_rank"""
CLICKED = 'import click\n@click.command()\n@click.option("--local-rank", default=0)'
RUN = 'subprocess.run([sys.executable, __file__, f"--local_rank={n}"])'
MEET = """\
from pathlib import Path
import subprocess, tempfile
PORT = 29533
SET = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
def main():
    MEET
    DDP(Net())
    dist.destroy_process_group()
main()
"""
BEGUN = 'dist.init_process_group("gloo")'
SPAWN = """\
import conf
from concurrent.futures import ProcessPoolExecutor
def work(rank, n):
    dist.init_process_group("gloo", rank=rank, world_size=n)
    DDP(Net())
    dist.destroy_process_group()
def rows():
    for x, y in DataLoader(make(8), batch_size=2, num_workers=2, multiprocessing_context="spawn"):
        print(x.sum())
class Start:
    def pool(self):
        with ProcessPoolExecutor(2, mp_context=mp.get_context("spawn")) as pool:
            list(pool.map(work, [0, 1], [2, 2]))
"""
CONF = "def start(function, n):\n    mp.spawn(function, args=(n,), nprocs=n)\n"
STARTS = ["conf.start(work, 2)", "import fire\nfire.Fire(rows)", "Start().pool()"]
FORK = """\
import multiprocessing
class Env:
    def __init__(self):
        if torch.cuda.is_available():
            WARM
def work(rank):
    print(torch.ones(1, device=f"cuda:{rank}"))
def main():
    Env()
    with multiprocessing.Pool(2) as pool:
        pool.map(work, range(2))
if __name__ == "__main__":
    main()
"""
WORKERS = """\
def collate(batch):
    x, y = zip(*batch)
    return torch.stack(x).cuda(), torch.stack(y)
x = torch.randn(8, 10).to("cuda")
DATA
for batch in DataLoader(data, batch_size=2, num_workers=WORKERS, collate_fn=COLLATE):
    print(batch)
"""
CPU = """\
\"\"\"On a cluster without GPU or cuda.\"\"\"
def summed(*numbers):
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()
def main():
    torch.cuda.manual_seed_all(1)
    dist.init_process_group(BACKEND)
    model = DDP(Net().to("cpu"))
    print(summed(1, 2))
    dist.destroy_process_group()
main()
"""
GPU = CPU.replace('Net().to("cpu")', "Net().cuda()")
LIGHTNING = """\
import lightning as L
from lightning.pytorch.strategies import DDPStrategy
def main():
    L.Trainer(accelerator=WHERE, devices=4, strategy=DDPStrategy(process_group_backend="nccl")).fit(Net())
main()
"""


def _of(codes: str, text: str, *pairs: str, **others: str) -> tuple[str, dict[str, str]]:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return codes, {"train": text, **others}


def _option(codes: str, declared: str, mark: str, read: str, start: str = "main()") -> tuple[str, dict[str, str]]:
    return _of(codes, OPTION, "DECLARED", declared, "MARK", mark, "READ", read, "START", start)


def _meet(codes: str, *lines: str) -> tuple[str, dict[str, str]]:
    return _of(codes, MEET, "MEET", "\n    ".join(lines))


LAUNCHES: list[tuple[str, dict[str, str]]] = [
    _option("LS304", CLICKED, "local_rank", "pass"),
    _option("LS304", "import fire", "local_rank=0", "pass", "fire.Fire(main)"),
    _option("LS304", "", "", PARSED),
    _option("LS304", "", "", "local_rank = int(sys.argv[1])"),
    _option("", "", "", f"{PARSED}\n    for n in range(4):\n        {RUN}"),
    _option("", "", "", PARSED.replace("args.local_rank", 'int(os.environ["LOCAL_RANK"])')),
    _option("", "", "", PARSED + "\n    args.local_rank = local_rank = torch.cuda.device_count() - 1"),
    _meet("LS305", "os.environ |= SET".replace("SET", '{"MASTER_PORT": "1234"}'), BEGUN),
    _meet("LS305", "for name, value in SET.items():\n        os.environ[name] = value", BEGUN),
    _meet("", "for name, value in SET.items():\n        os.environ.setdefault(name, value)", BEGUN),
    _meet("LS305", 'env = os.environ\n    env["MASTER_PORT"] = f"{PORT}"', BEGUN),
    _meet("", 'env = dict(os.environ)\n    env["MASTER_PORT"] = f"{PORT}"', BEGUN),
    _meet("LS305", 'os.environ["MASTER_ADDR"] = "192.168.1.7"', BEGUN),
    _meet("", 'os.environ["MASTER_ADDR"] = "127.0.0.1"', BEGUN),
    _meet("LS305", 'dist.init_process_group("gloo", init_method="tcp://{}:{}".format(os.environ["HOST"], PORT))'),
    _meet("", 'dist.init_process_group("gloo", init_method="tcp://{}:{}".format(os.environ["HOST"], os.environ["P"]))'),
    _meet(
        "LS305",
        'meeting = Path(tempfile.gettempdir()) / "meeting"',
        'dist.init_process_group("gloo", init_method=f"file://{meeting}")',
    ),
    _meet("", "meeting = Path(tempfile.mkdtemp())", 'dist.init_process_group("gloo", init_method=f"file://{meeting}")'),
    _meet("LS305", BEGUN, 'subprocess.run(["torchrun", "--master-port", "29511", "train.py"])'),
    _meet("", BEGUN, 'subprocess.run(["torchrun", "--rdzv-endpoint=localhost:0", "train.py"])'),
    *(_of("LS314", SPAWN + start + "\n", conf=CONF) for start in STARTS),
    _of(
        "",
        SPAWN + "".join(f'if __name__ == "__main__":\n    {each}\n'.replace("\nfire", "\n    fire") for each in STARTS),
        conf=CONF,
    ),
    _of("LS315", FORK, "WARM", "torch.cuda.init()"),
    _of("LS315", FORK, "WARM", 'self.net = Net().to("cuda")'),
    _of("", FORK, "WARM", "print(torch.cuda.device_count())"),
    _of("", "mp.set_start_method('spawn')\n" + FORK, "WARM", "torch.cuda.init()"),
    _of("LS315", WORKERS, "DATA", "data = make(8)", "WORKERS", "2", "COLLATE", "collate"),
    _of("LS315", WORKERS, "DATA", "data = TensorDataset(x)", "WORKERS", "2", "COLLATE", "None"),
    _of("", WORKERS, "DATA", "data = TensorDataset(x)", "WORKERS", "0", "COLLATE", "collate"),
    _of("LS316", CPU, "BACKEND", '"nccl"'),
    _of("", CPU, "BACKEND", '"gloo"'),
    _of("LS316", GPU, "BACKEND", '"nccl"'),
    _of("", GPU, "BACKEND", '"nccl"', "dtype=torch.float64", 'device="cuda"'),
    _of("", GPU, "BACKEND", ""),
    _of("LS316", LIGHTNING, "WHERE", '"cpu"'),
    _of("", LIGHTNING, "WHERE", '"gpu"'),
]
