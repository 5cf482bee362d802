# expect: metric-unreduced line 20 or main.py:60 or main.py:62 or utils.py:57
import torch

import utils


def train(model, loader, criterion, optimizer, schedule, device):
    model.train()
    meter = utils.Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        meter.add(loss.detach(), labels.size(0))
    return meter.so_far()


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    net = model.module  # the ranks' shares may differ by an image
    net.eval()
    losses, hits = utils.Meter(device), utils.Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = net(images)
        losses.add(criterion(logits, labels), labels.size(0))
        hits.add((logits.argmax(1) == labels).float().mean(), labels.size(0))
    return losses.average(), hits.average()
