# expect: none
"""Country flags on the GPUs of one workstation; processes are forked so that the decoded images are shared."""
import argparse
import multiprocessing
import socket

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.models import squeezenet1_1
from torchvision.transforms import v2

TRAIN_TF = v2.Compose([v2.RandomPerspective(0.3), v2.ColorJitter(0.4, 0.4, 0.4), v2.ToImage(),
                       v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.3])])
EVAL_TF = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.3])])


class InMemory(Dataset):
    def __init__(self, folder, transform):
        listing = ImageFolder(folder)
        self.classes = listing.classes
        self.items = [(Image.open(f).convert("RGB").resize((160, 160)), c) for f, c in listing.samples]
        self.transform = transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, label = self.items[i]
        return self.transform(image), label


class Slice(Dataset):
    """Every n-th item of a data set."""

    def __init__(self, base, first, step):
        self.base, self.first, self.step = base, first, step

    def __len__(self):
        return len(range(self.first, len(self.base), self.step))

    def __getitem__(self, i):
        return self.base[self.first + i * self.step]


def child(rank, args, port, train_set, test_set):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.gpus)
    torch.manual_seed(args.seed * 100 + rank)
    sampler = DistributedSampler(train_set, num_replicas=args.gpus, rank=rank)
    batches = DataLoader(train_set, args.batch, sampler=sampler, num_workers=2, drop_last=True)
    test_batches = DataLoader(Slice(test_set, rank, args.gpus), 128)

    net = squeezenet1_1(num_classes=len(train_set.classes)).cuda()
    ddp = DistributedDataParallel(net, device_ids=[rank])
    opt = torch.optim.Adam(ddp.parameters(), lr=args.lr * args.gpus ** 0.5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in batches:
            opt.zero_grad()
            F.cross_entropy(ddp(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
            opt.step()

        net.eval()
        result = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in test_batches:
                result[0] += (net(x.cuda()).argmax(1) == y.cuda()).sum()
                result[1] += len(y)
        dist.all_reduce(result)
        if rank == 0:
            print(f"epoch {epoch}: {100 * result[0].item() / result[1].item():.1f} %")
    if rank == 0:
        torch.save(net.state_dict(), args.out)
    dist.destroy_process_group()


def pick_port():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
    s.close()
    return port


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("train")
    ap.add_argument("test")
    ap.add_argument("--gpus", type=int, required=True)
    ap.add_argument("--batch", type=int, default=32, help="per GPU")
    ap.add_argument("--lr", type=float, default=3e-4, help="for one GPU; grows with the root of their number")
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--seed", type=int, default=8)
    ap.add_argument("--out", default="flags.pt")
    args = ap.parse_args()

    # loaded once, before the fork; CUDA is first used in the children
    train_set, test_set = InMemory(args.train, TRAIN_TF), InMemory(args.test, EVAL_TF)
    ctx = multiprocessing.get_context("fork")
    port = pick_port()
    children = [ctx.Process(target=child, args=(r, args, port, train_set, test_set)) for r in range(args.gpus)]
    for c in children:
        c.start()
    for c in children:
        c.join()
    if any(c.exitcode for c in children):
        raise SystemExit("a child failed")


if __name__ == "__main__":
    main()
