# expect: eval-part-as-whole line 34 or 35 or ../main.py:43
import torch
import torch.nn.functional as F

from .utils import total


def train_one_epoch(parallel, batches, optimizer, schedule, env):
    parallel.train()
    stats = torch.zeros(2, device=env.device)
    for images, labels in batches:
        images = images.to(env.device, non_blocking=True)
        labels = labels.to(env.device, non_blocking=True)
        loss = F.cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        stats[0] += loss.detach()
        stats[1] += 1
    loss_sum, steps = total(stats)
    return loss_sum / steps


def test(model, batches, env):
    model.eval()
    stats = torch.zeros(2, dtype=torch.float64, device=env.device)
    with torch.inference_mode():
        for images, labels in batches:
            images, labels = images.to(env.device), labels.to(env.device)
            guess = model(images).argmax(dim=1)
            stats[0] += (guess == labels).sum()
            stats[1] += labels.numel()
    correct, count = stats.tolist()
    return correct / count
