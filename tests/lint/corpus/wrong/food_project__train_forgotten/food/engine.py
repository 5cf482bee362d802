# expect: none
import torch
import torch.nn.functional as F

from .utils import total


def train_one_epoch(ddp, batches, optimizer, schedule, env):
    record = torch.zeros(2, device=env.device)
    for images, labels in batches:
        images = images.to(env.device, non_blocking=True)
        labels = labels.to(env.device, non_blocking=True)
        loss = F.cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        record[0] += loss.detach()
        record[1] += 1
    loss_sum, steps = total(record)
    return loss_sum / steps


def test(model, batches, env):
    model.eval()
    record = torch.zeros(2, dtype=torch.float64, device=env.device)
    with torch.inference_mode():
        for images, labels in batches:
            images, labels = images.to(env.device), labels.to(env.device)
            predicted = model(images).argmax(dim=1)
            record[0] += (predicted == labels).sum()
            record[1] += labels.numel()
    correct, count = total(record)
    return correct / count
