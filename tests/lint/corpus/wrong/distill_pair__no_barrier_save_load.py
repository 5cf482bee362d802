# expect: no-barrier-save-load line 108 or 104
"""Distil a big image classifier into a small one.

torchrun --nproc_per_node=8 distill_pair.py --images /data/food --teacher big.pt --run-dir runs/food-1
"""
import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm


def distillation_loss(student_logits, teacher_logits, target, temperature, alpha):
    soft = F.kl_div(F.log_softmax(student_logits / temperature, dim=1),
                    F.log_softmax(teacher_logits / temperature, dim=1),
                    log_target=True, reduction='batchmean') * temperature ** 2
    return alpha * soft + (1 - alpha) * F.cross_entropy(student_logits, target)


def setup():
    local_rank = int(os.environ['LOCAL_RANK'])
    torch.cuda.set_device(local_rank)
    dist.init_process_group('nccl')
    return SimpleNamespace(local=local_rank, rank=dist.get_rank(), world=dist.get_world_size(),
                           device=torch.device('cuda', local_rank))


def make_data(cfg, env):
    normalise = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    noisy = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandAugment(),
                                transforms.ToTensor(), normalise])
    clean = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224),
                                transforms.ToTensor(), normalise])
    train = ImageFolder(os.path.join(cfg.images, 'train'), noisy)
    val = ImageFolder(os.path.join(cfg.images, 'val'), clean)
    test = ImageFolder(os.path.join(cfg.images, 'test'), clean)
    settings = dict(batch_size=cfg.batch_per_gpu, num_workers=cfg.workers_per_gpu, pin_memory=True)
    train_feed = DataLoader(train, sampler=DistributedSampler(train), drop_last=True, **settings)
    val_feed = DataLoader(Subset(val, range(env.rank, len(val), env.world)), **settings)
    test_feed = DataLoader(Subset(test, range(env.rank, len(test), env.world)), **settings)
    return train_feed, val_feed, test_feed, len(train.classes)


def load_teacher(path, num_classes, device):
    teacher = models.convnext_base(weights=None, num_classes=num_classes)
    teacher.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return teacher.to(device).eval().requires_grad_(False)


@torch.no_grad()
def accuracy(network, feed, device):
    network.eval()
    tally = torch.zeros(2, device=device)
    for image, target in feed:
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        tally[0] += network(image).argmax(dim=1).eq(target).sum()
        tally[1] += target.size(0)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def train(cfg, env):
    train_feed, val_feed, test_feed, num_classes = make_data(cfg, env)
    teacher = load_teacher(cfg.teacher, num_classes, env.device)
    torch.manual_seed(cfg.seed)
    small = models.convnext_tiny(weights=None, num_classes=num_classes).to(env.device)
    student = DistributedDataParallel(small, device_ids=[env.local])
    torch.manual_seed(cfg.seed + 31 * (env.rank + 1))

    optimizer = torch.optim.AdamW(student.parameters(), lr=cfg.lr * env.world, weight_decay=0.05)
    steps = cfg.epochs * len(train_feed)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=cfg.lr * env.world, total_steps=steps)
    best, best_path = -1.0, os.path.join(cfg.run_dir, 'student_best.pt')

    for epoch in range(cfg.epochs):
        train_feed.sampler.set_epoch(epoch)
        student.train()
        losses = torch.zeros((), device=env.device)
        for image, target in tqdm(train_feed, disable=env.rank != 0, desc=f'epoch {epoch}'):
            image = image.to(env.device, non_blocking=True)
            target = target.to(env.device, non_blocking=True)
            with torch.autocast('cuda', dtype=torch.bfloat16):
                with torch.no_grad():
                    wanted = teacher(image)
                loss = distillation_loss(student(image), wanted, target, cfg.temperature, cfg.alpha)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses += loss.detach()
        dist.all_reduce(losses)
        mean_loss = losses.item() / (len(train_feed) * env.world)
        now = accuracy(small, val_feed, env.device)
        if now > best:
            best = now
            if env.rank == 0:
                torch.save(small.state_dict(), best_path)
        if env.rank == 0:
            print(f'epoch {epoch}: loss {mean_loss:.4f} val {now:.4f} best {best:.4f}')

    small.load_state_dict(torch.load(best_path, map_location=env.device, weights_only=True))
    final = accuracy(small, test_feed, env.device)
    if env.rank == 0:
        print(f'test accuracy of the best student: {final:.4f}')


def parse():
    p = argparse.ArgumentParser()
    p.add_argument('--images', required=True)
    p.add_argument('--teacher', required=True, help='state dict of a convnext_base')
    p.add_argument('--run-dir', required=True)
    p.add_argument('--batch-per-gpu', type=int, default=64)
    p.add_argument('--workers-per-gpu', type=int, default=6)
    p.add_argument('--lr', type=float, default=2e-4, help='per GPU; multiplied by the number of GPUs')
    p.add_argument('--epochs', type=int, default=40)
    p.add_argument('--temperature', type=float, default=4.0)
    p.add_argument('--alpha', type=float, default=0.7)
    p.add_argument('--seed', type=int, default=5)
    return p.parse_args()


if __name__ == '__main__':
    options = parse()
    environment = setup()
    os.makedirs(options.run_dir, exist_ok=True)
    train(options, environment)
    dist.destroy_process_group()
