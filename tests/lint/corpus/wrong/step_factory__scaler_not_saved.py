# expect: scaler-not-saved line 70 or 67 or 78 or 81 or 118 or 119 or 132
"""Gradient accumulation under AMP; the update is a closure made by `make_update`."""
import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms


def windows(loader, size):
    """Lists of `size` batches; the last one may be shorter."""
    held = []
    for batch in loader:
        held.append(batch)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held


def make_update(net, opt, sched, scaler, criterion, device, max_norm):
    def update(window):
        total = torch.zeros((), device=device)
        final = len(window) - 1
        for position, (x, y) in enumerate(window):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            quiet = net.no_sync() if position < final else contextlib.nullcontext()
            with quiet:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(net(x), y) / len(window)
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        sched.step()
        return total

    return update


def make_evaluation(net, loader, device):
    @torch.no_grad()
    def evaluation():
        net.eval()
        sums = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            sums += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    return evaluation


def save(path, net, opt, sched, epoch):
    if dist.get_rank() != 0:
        return
    torch.save({
        "net": net.state_dict(),
        "opt": opt.state_dict(),
        "sched": sched.state_dict(),
        "epoch": epoch,
    }, path)


def resume(path, net, opt, sched):
    if not os.path.isfile(path):
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    sched.load_state_dict(saved["sched"])
    return saved["epoch"] + 1


def main(args):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{local}")

    norm = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train_set = torchvision.datasets.ImageFolder(
        os.path.join(args.data, "train"),
        transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor(), norm]))
    val_set = torchvision.datasets.ImageFolder(
        os.path.join(args.data, "val"),
        transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm]))
    order = DistributedSampler(train_set, seed=args.seed)
    train_dl = DataLoader(train_set, batch_size=args.micro_batch, sampler=order, drop_last=True,
                          num_workers=args.workers, pin_memory=True)
    val_dl = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=args.micro_batch,
                        num_workers=args.workers, pin_memory=True)

    torch.manual_seed(args.seed)
    bare = torchvision.models.vit_b_16(weights=None, dropout=0.1, num_classes=len(train_set.classes)).to(device)
    net = Wrapped(bare, device_ids=[local])
    torch.manual_seed(args.seed + 100 * (rank + 1))

    # args.lr is meant for 256 images per update
    lr = args.lr * args.micro_batch * args.accumulate * world / 256
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.1)
    updates = args.epochs * math.ceil(len(train_dl) / args.accumulate)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=updates)
    scaler = torch.amp.GradScaler("cuda")
    start = resume(args.checkpoint, bare, opt, sched)

    update = make_update(net, opt, sched, scaler, nn.CrossEntropyLoss(), device, args.max_norm)
    evaluation = make_evaluation(bare, val_dl, device)
    for epoch in range(start, args.epochs):
        order.set_epoch(epoch)
        net.train()
        losses = torch.stack([update(window) for window in windows(train_dl, args.accumulate)])
        mean_loss = losses.mean()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)    # equally many batches on all ranks
        accuracy = evaluation()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss.item():.4f}, accuracy {accuracy:.4f}")
        save(args.checkpoint, bare, opt, sched, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--checkpoint", required=True, help="written each epoch, read at the start if it exists")
    ap.add_argument("--micro-batch", type=int, default=32, help="per process and forward")
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-4, help="for 256 images per update")
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--workers", type=int, default=4, help="per process")
    ap.add_argument("--seed", type=int, default=17)
    main(ap.parse_args())
