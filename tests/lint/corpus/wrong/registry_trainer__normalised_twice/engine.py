# expect: normalised-twice line 12 or data.py:51 or data.py:52
"""One epoch of training, one evaluation."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def batches(loader, device):
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=device).view(1, 3, 1, 1)
    for images, labels in loader:
        images = images.to(device, non_blocking=True).sub_(mean).div_(std)
        yield images, labels.to(device, non_blocking=True)


def train_epoch(model, loader, optimizer, scaler, device):
    model.train()
    totals = torch.zeros(2, device=device)
    for images, labels in batches(loader, device):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        totals[0] += loss.detach() * labels.numel()
        totals[1] += labels.numel()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=device)
    seen = torch.zeros((), dtype=torch.long, device=device)
    for images, labels in batches(loader, device):
        right += (model(images).argmax(1) == labels).sum()
        seen += labels.numel()
    dist.all_reduce(right)
    dist.all_reduce(seen)
    return 100.0 * right.item() / seen.item()
