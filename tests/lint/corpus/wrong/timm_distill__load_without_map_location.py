# expect: load-without-map-location line 38
"""Knowledge distillation of a large frozen timm teacher into a small student (torchrun)."""
import argparse
import logging
import os

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data import create_transform, resolve_model_data_config
from timm.layers import convert_sync_batchnorm
from timm.utils import AverageMeter, random_seed
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torchvision.datasets import ImageFolder

_logger = logging.getLogger("distill")

parser = argparse.ArgumentParser(description="distillation")
parser.add_argument("data_dir")
parser.add_argument("--teacher", default="resnet101d")
parser.add_argument("--teacher-checkpoint", required=True)
parser.add_argument("--student", default="mobilenetv3_large_100")
parser.add_argument("--classes", type=int, default=200)
parser.add_argument("--tau", type=float, default=4.0)
parser.add_argument("--alpha", type=float, default=0.7)
parser.add_argument("-b", "--batch-size", type=int, default=64, help="batch size of one process")
parser.add_argument("--lr-256", type=float, default=0.08, help="rate at a global batch of 256 images")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("-j", "--workers", type=int, default=4, help="workers of one process")
parser.add_argument("--drop", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="./output")


def build_teacher(args, device):
    teacher = timm.create_model(args.teacher, num_classes=args.classes)
    state = torch.load(args.teacher_checkpoint, weights_only=True)
    teacher.load_state_dict(state["state_dict"] if "state_dict" in state else state)
    teacher.requires_grad_(False)
    return teacher.to(device).eval()


def build_data(args, student, rank, world):
    cfg = resolve_model_data_config(student)
    ds_train = ImageFolder(os.path.join(args.data_dir, "train"), create_transform(**cfg, is_training=True))
    ds_eval = ImageFolder(os.path.join(args.data_dir, "val"), create_transform(**cfg, is_training=False))
    sampler = torch.utils.data.DistributedSampler(ds_train, drop_last=True)
    loader_train = torch.utils.data.DataLoader(
        ds_train, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=True,
        drop_last=True)
    ds_eval = torch.utils.data.Subset(ds_eval, range(rank, len(ds_eval), world))
    loader_eval = torch.utils.data.DataLoader(ds_eval, batch_size=args.batch_size, num_workers=args.workers)
    return loader_train, loader_eval


def distillation_loss(student_logits, teacher_logits, target, tau, alpha):
    kl = F.kl_div(F.log_softmax(student_logits / tau, dim=1), F.log_softmax(teacher_logits / tau, dim=1),
                    reduction="batchmean", log_target=True) * tau ** 2
    return alpha * kl + (1 - alpha) * F.cross_entropy(student_logits, target)


def train_one_epoch(epoch, student, teacher, loader, optimizer, args, device):
    loader.sampler.set_epoch(epoch)
    student.train()
    losses = torch.zeros((), device=device)
    for input, target in loader:
        input, target = input.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.no_grad():
            teacher_out = teacher(input)
        output = student(input)
        loss = distillation_loss(output, teacher_out, target, args.tau, args.alpha)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.detach()
    losses /= len(loader)
    dist.all_reduce(losses)
    return losses.item() / dist.get_world_size()


def validate(model, loader, device):
    model.eval()
    correct = torch.zeros(2, device=device)
    with torch.no_grad():
        for input, target in loader:
            input, target = input.to(device), target.to(device)
            correct[0] += model(input).argmax(-1).eq(target).sum()
            correct[1] += target.shape[0]
    dist.all_reduce(correct)
    return 100 * (correct[0] / correct[1]).item()


def main():
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    random_seed(args.seed, rank)

    teacher = build_teacher(args, device)
    student = timm.create_model(args.student, num_classes=args.classes, drop_rate=args.drop)
    student = convert_sync_batchnorm(student).to(device)
    loader_train, loader_eval = build_data(args, student, rank, world)
    student = NativeDDP(student, device_ids=[local_rank])

    lr = args.lr_256 * args.batch_size * world / 256
    optimizer = torch.optim.SGD(student.parameters(), lr=lr, momentum=0.9, weight_decay=1e-5, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    if rank == 0:
        os.makedirs(args.output, exist_ok=True)

    best, meter = 0.0, AverageMeter()
    for epoch in range(args.epochs):
        loss = train_one_epoch(epoch, student, teacher, loader_train, optimizer, args, device)
        scheduler.step()
        meter.update(loss)
        top1 = validate(student.module, loader_eval, device)
        _logger.info("epoch %d loss %.4f (mean %.4f) top1 %.2f", epoch, loss, meter.avg, top1)
        if top1 > best:
            best = top1
            if rank == 0:
                torch.save(student.module.state_dict(), os.path.join(args.output, "student_best.pth"))
    _logger.info("best top1 %.2f", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
