# expect: none
"""srun --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 python slurm_plankton.py --data ... """
import argparse
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


class Cluster:
    """What SLURM says about this process."""

    def __init__(self, env=os.environ):
        self.rank = int(env["SLURM_PROCID"])
        self.local_rank = int(env["SLURM_LOCALID"])
        self.size = int(env["SLURM_NTASKS"])
        self.per_node = int(env["SLURM_NTASKS_PER_NODE"])
        self.job = int(env["SLURM_JOB_ID"])
        self.nodes = env["SLURM_JOB_NODELIST"]

    def connect(self):
        hosts = subprocess.run(["scontrol", "show", "hostnames", self.nodes], capture_output=True, text=True,
                               check=True).stdout.split()
        port = 20000 + self.job % 20000
        dist.init_process_group("nccl", init_method=f"tcp://{hosts[0]}:{port}", rank=self.rank,
                                world_size=self.size)
        torch.cuda.set_device(self.local_rank)

    @property
    def main(self):
        return self.rank == 0


def build_data(args, cluster):
    def chain(*ops):
        return v2.Compose([v2.ToImage(), v2.Grayscale(3), *ops, v2.ToDtype(torch.float32, scale=True),
                           v2.Normalize([0.9] * 3, [0.15] * 3)])

    train = ImageFolder(os.path.join(args.data, "train"), chain(v2.RandomRotation(180, fill=255), v2.Resize([128, 128])))
    test = ImageFolder(os.path.join(args.data, "test"), chain(v2.Resize([128, 128])))
    workers = args.node_workers // cluster.per_node
    sampler = DistributedSampler(train, num_replicas=cluster.size, rank=cluster.rank)
    train_it = DataLoader(train, batch_size=args.global_batch // cluster.size, sampler=sampler,
                          num_workers=workers, pin_memory=True, drop_last=True)
    part = Subset(test, list(range(cluster.rank, len(test), cluster.size)))
    test_it = DataLoader(part, batch_size=256, num_workers=workers)
    return train_it, test_it, sampler, len(train.classes)


def evaluate(net, batches):
    net.eval()
    agg = torch.zeros(2, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        for x, y in batches:
            x, y = x.cuda(), y.cuda()
            agg += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(y.numel(), device="cuda")])
    dist.all_reduce(agg, op=dist.ReduceOp.SUM)
    return float(agg[0] / agg[1])


def work(args, cluster):
    torch.manual_seed(args.seed + cluster.rank)
    train_it, test_it, sampler, classes = build_data(args, cluster)
    net = models.densenet121(num_classes=classes, drop_rate=0.1).cuda()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[cluster.local_rank])
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.93)
    loss_fn = nn.CrossEntropyLoss()

    begin = 0
    if args.ckpt and os.path.isfile(args.ckpt):
        blob = torch.load(args.ckpt, map_location=f"cuda:{cluster.local_rank}", weights_only=True)
        net.load_state_dict(blob["net"])
        opt.load_state_dict(blob["opt"])
        sched.load_state_dict(blob["sched"])
        begin = blob["finished"]

    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_it:
            opt.zero_grad(set_to_none=True)
            loss_fn(ddp(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
            opt.step()
        sched.step()
        acc = evaluate(net, test_it)
        if cluster.main:
            print(f"epoch={epoch} acc={acc:.4f}", flush=True)
            if args.ckpt:
                torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                            "finished": epoch + 1}, args.ckpt)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--ckpt")
    ap.add_argument("--epochs", type=int, default=45)
    ap.add_argument("--global-batch", type=int, default=512, help="of all tasks together")
    ap.add_argument("--lr", type=float, default=1e-3, help="for the global batch")
    ap.add_argument("--node-workers", type=int, default=32, help="loader workers of one node")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    cluster = Cluster()
    cluster.connect()
    work(args, cluster)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
