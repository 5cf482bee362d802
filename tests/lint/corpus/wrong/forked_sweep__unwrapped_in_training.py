# expect: unwrapped-in-training line 61
"""Two phases on one machine: the head alone, then all layers, from the first phase's best weights."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms


def log0(*what):
    if dist.get_rank() == 0:
        print(*what, flush=True)


def dtd(root, split, tf):
    return datasets.DTD(root, split=split, transform=tf)


def data(args, rank, nprocs):
    norm = transforms.Normalize((0.529, 0.473, 0.425), (0.268, 0.261, 0.269))
    augmented = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                                    transforms.ToTensor(), norm])
    centred = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm])
    train = dtd(args.root, "train", augmented)
    val = dtd(args.root, "val", centred)
    loader = DataLoader(train, args.batch // nprocs, sampler=DistributedSampler(train), drop_last=True,
                        num_workers=args.workers // nprocs)
    return loader, DataLoader(Subset(val, range(rank, len(val), nprocs)), 64, num_workers=args.workers // nprocs)


def accuracy(net, loader, rank):
    was_training = net.training
    net.eval()
    n = torch.zeros(2, device=rank)
    with torch.no_grad():
        for x, y in loader:
            n[0] += (net(x.to(rank)).argmax(1) == y.to(rank)).sum()
            n[1] += len(y)
    net.train(was_training)
    dist.all_reduce(n)
    return (n[0] / n[1]).item()


def phase(name, net, loaders, lr, epochs, rank, best_file, shift):
    train, val = loaders
    ddp = DDP(net, device_ids=[rank])
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    top = -1.0
    for epoch in range(epochs):
        train.sampler.set_epoch(shift + epoch)
        ddp.train()
        for x, y in train:
            x, y = x.to(rank, non_blocking=True), y.to(rank, non_blocking=True)
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        score = accuracy(net, val, rank)
        log0(name, epoch, f"{score:.4f}")
        if score > top:
            top = score
            if rank == 0:
                torch.save(net.state_dict(), best_file)
    return top


def process(rank, nprocs, rendezvous, args):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=nprocs)
    torch.manual_seed(args.seed + rank)
    net = models.vit_b_16()
    net.load_state_dict(torch.load(args.pretrained, map_location="cpu", weights_only=True))
    net.heads = nn.Linear(768, 47)
    net.to(rank)
    loaders = data(args, rank, nprocs)

    net.requires_grad_(False)
    net.heads.requires_grad_(True)
    head_file = os.path.join(args.out, "head.pt")
    top = phase("head", net, loaders, args.lr * 10, args.epochs // 4, rank, head_file, 0)
    log0("best with frozen layers", top)

    dist.barrier()
    net.load_state_dict(torch.load(head_file, map_location=f"cuda:{rank}", weights_only=True))
    net.requires_grad_(True)
    top = phase("all", net, loaders, args.lr, args.epochs, rank, os.path.join(args.out, "all.pt"), args.epochs // 4)
    log0("best with all layers", top)
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="data")
    p.add_argument("--out", required=True)
    p.add_argument("--pretrained", required=True, help="weights file for vit_b_16")
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--batch", type=int, default=64, help="sum over the GPUs")
    p.add_argument("--workers", type=int, default=8, help="sum over the GPUs")
    p.add_argument("--lr", type=float, default=0.005, help="for the sum of the batches")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    os.makedirs(args.out, exist_ok=True)
    datasets.DTD(args.root, download=True)
    with tempfile.TemporaryDirectory() as tmp:
        mp.start_processes(process, args=(args.gpus, os.path.join(tmp, "rdzv"), args), nprocs=args.gpus,
                           start_method="fork")


if __name__ == "__main__":
    main()
