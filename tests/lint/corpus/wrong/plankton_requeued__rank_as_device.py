# expect: rank-as-device line 30 or 86 or 87 or 94
"""Plankton images on the cluster. Started by

    #SBATCH --nodes=4 --ntasks-per-node=4 --gpus-per-node=4
    export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    srun python slurm_plankton.py --data $SCRATCH/plankton --out $SCRATCH/out/$SLURM_JOB_ID
"""
import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models, transforms

log = logging.getLogger("plankton")


class Slurm:
    """What srun says of this task."""

    def __init__(self):
        env = os.environ
        self.rank = int(env["SLURM_PROCID"])
        self.local = int(env["SLURM_PROCID"])
        self.world = int(env["SLURM_NTASKS"])
        self.per_node = int(env["SLURM_NTASKS_PER_NODE"])
        self.cpus = int(env["SLURM_CPUS_ON_NODE"])

    @property
    def chief(self):
        return self.rank == 0


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--batch-size", type=int, default=1024, help="of all tasks together")
    ap.add_argument("--lr", type=float, default=0.4, help="for the whole batch")
    ap.add_argument("--seed", type=int, default=5)
    return ap.parse_args()


def loaders(args, job):
    gray = [transforms.Grayscale(3), transforms.ToTensor(), transforms.Normalize([0.93] * 3, [0.17] * 3)]
    train_set = datasets.ImageFolder(
        f"{args.data}/train",
        transforms.Compose([transforms.RandomRotation(180, fill=255), transforms.RandomResizedCrop(128)] + gray))
    val_set = datasets.ImageFolder(
        f"{args.data}/val", transforms.Compose([transforms.Resize((128, 128))] + gray))
    batch = args.batch_size // job.world
    workers = max(1, job.cpus // job.per_node - 1)
    sampler = DistributedSampler(train_set, num_replicas=job.world, rank=job.rank, seed=args.seed)
    train = DataLoader(train_set, batch_size=batch, sampler=sampler, num_workers=workers,
                       pin_memory=True, drop_last=True, persistent_workers=True)
    part = Subset(val_set, range(job.rank, len(val_set), job.world))
    val = DataLoader(part, batch_size=batch, num_workers=workers, pin_memory=True)
    return train, val, len(train_set.classes)


def evaluate(net, data, device):
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for x, y in data:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            logits = net(x)
            sums[0] += nn.functional.cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(1) == y).sum()
            sums[2] += y.shape[0]
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    loss, right, n = sums.tolist()
    return loss / n, right / n


def main():
    args, job = get_args(), Slurm()
    logging.basicConfig(level=logging.INFO if job.chief else logging.WARNING)
    torch.cuda.set_device(job.local)
    device = torch.device("cuda", job.local)
    dist.init_process_group("nccl", init_method="env://", rank=job.rank, world_size=job.world)
    torch.manual_seed(args.seed * 1000 + job.rank)

    train, val, classes = loaders(args, job)
    net = models.resnet34(num_classes=classes)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    ddp = DDP(net, device_ids=[job.local], output_device=job.local)
    optimizer = optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 60, 80])

    writer = None
    if job.chief:
        os.makedirs(args.out, exist_ok=True)
        writer = SummaryWriter(args.out)

    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        scheduler.step()
        val_loss, val_acc = evaluate(net, val, device)
        log.info("epoch %d val loss %.4f acc %.4f", epoch, val_loss, val_acc)
        if writer is not None:
            writer.add_scalar("val/loss", val_loss, epoch)
            writer.add_scalar("val/acc", val_acc, epoch)

    if job.chief:
        torch.save(net.state_dict(), os.path.join(args.out, "resnet34.pt"))
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
