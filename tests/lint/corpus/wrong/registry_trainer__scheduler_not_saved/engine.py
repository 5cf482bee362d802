# expect: none
"""One epoch of training, one evaluation."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def batches(loader, device):
    for images, labels in loader:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


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
