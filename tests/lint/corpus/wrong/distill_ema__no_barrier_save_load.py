# expect: no-barrier-save-load line 150 or 141
"""Distil a big CIFAR-100 teacher into a small student, of which a moving average is kept and evaluated."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler


class ModelEma:
    """Moving average of the weights; buffers are copied."""

    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)
        for e, b in zip(self.module.buffers(), model.buffers()):
            e.copy_(b)


def make_resnet(depth, num_classes=100):
    net = getattr(torchvision.models, f"resnet{depth}")(weights=None, num_classes=num_classes)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def load_teacher(path, device):
    teacher = make_resnet(50)
    teacher.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return teacher.to(device).eval().requires_grad_(False)


def make_sets(root, local_rank):
    norm = T.Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    augment = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.TrivialAugmentWide(), T.ToTensor(), norm])
    plain = T.Compose([T.ToTensor(), norm])
    if local_rank == 0:
        torchvision.datasets.CIFAR100(root, train=True, download=True)
    dist.barrier()
    return (
        torchvision.datasets.CIFAR100(root, train=True, transform=augment),
        torchvision.datasets.CIFAR100(root, train=False, transform=plain),
    )


def kd_loss(student_logits, teacher_logits, target, alpha, temp):
    soft = F.kl_div(
        F.log_softmax(student_logits / temp, 1), F.log_softmax(teacher_logits / temp, 1),
        log_target=True, reduction="batchmean",
    )
    return alpha * temp**2 * soft + (1 - alpha) * F.cross_entropy(student_logits, target)


@torch.no_grad()
def top1(net, loader, device):
    net.eval()
    tally = torch.zeros(2, device=device)
    for img, target in loader:
        img, target = img.to(device, non_blocking=True), target.to(device, non_blocking=True)
        tally[0] += (net(img).argmax(1) == target).sum()
        tally[1] += len(target)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def main(opt):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    train_set, test_set = make_sets(opt.root, local_rank)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(
        train_set, opt.batch // world, sampler=sampler, num_workers=opt.workers, pin_memory=True, drop_last=True
    )
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), 500, num_workers=opt.workers)

    torch.manual_seed(opt.seed)
    teacher = load_teacher(opt.teacher, device)
    student = nn.SyncBatchNorm.convert_sync_batchnorm(make_resnet(18)).to(device)
    ema = ModelEma(student, opt.decay)
    ddp = DDP(student, device_ids=[local_rank])
    torch.manual_seed(opt.seed + 1 + rank)

    # opt.lr is for opt.batch images, and these are shared by the processes
    optim = torch.optim.SGD(ddp.parameters(), opt.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, opt.epochs)
    scaler = torch.amp.GradScaler("cuda")

    begin, best = 0, 0.0
    last_pt, best_pt = os.path.join(opt.out, "last.pt"), os.path.join(opt.out, "best_ema.pt")
    if opt.resume:
        ck = torch.load(last_pt, map_location=device, weights_only=True)
        student.load_state_dict(ck["student"])
        ema.module.load_state_dict(ck["ema"])
        optim.load_state_dict(ck["optim"])
        sched.load_state_dict(ck["sched"])
        scaler.load_state_dict(ck["scaler"])
        begin, best = ck["epoch"] + 1, ck["best"]

    for epoch in range(begin, opt.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        loss_sum = torch.zeros((), device=device)
        for img, target in train_loader:
            img, target = img.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                with torch.no_grad():
                    wanted = teacher(img)
                loss = kd_loss(ddp(img).float(), wanted.float(), target, opt.alpha, opt.temp)
            optim.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            ema.update(student)
            loss_sum += loss.detach()
        sched.step()
        loss_sum /= len(train_loader)
        dist.all_reduce(loss_sum, op=dist.ReduceOp.AVG)  # equally many batches of one size everywhere

        acc, acc_ema = top1(student, test_loader, device), top1(ema.module, test_loader, device)
        if rank == 0:
            print(f"{epoch:3d} loss {loss_sum.item():.4f} top1 {acc:.4f} ema {acc_ema:.4f}")
            if acc_ema > best:
                torch.save(ema.module.state_dict(), best_pt)
        best = max(best, acc_ema)
        if rank == 0:
            ck = {
                "student": student.state_dict(), "ema": ema.module.state_dict(), "optim": optim.state_dict(),
                "sched": sched.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch, "best": best,
            }
            torch.save(ck, last_pt)

    ema.module.load_state_dict(torch.load(best_pt, map_location=device, weights_only=True))
    final = top1(ema.module, test_loader, device)
    if rank == 0:
        print(f"best averaged student: {final:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--root", required=True)
    p.add_argument("--teacher", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--batch", type=int, default=512, help="all processes together")
    p.add_argument("--lr", type=float, default=0.2)
    p.add_argument("--workers", type=int, default=4, help="each process")
    p.add_argument("--decay", type=float, default=0.999)
    p.add_argument("--alpha", type=float, default=0.7)
    p.add_argument("--temp", type=float, default=4.0)
    p.add_argument("--seed", type=int, default=21)
    main(p.parse_args())
