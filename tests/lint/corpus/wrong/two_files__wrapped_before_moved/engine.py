# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    total, seen = torch.zeros((), device=device), 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(images)
        seen += len(images)
    return mean_over_ranks(total, seen, device)


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    correct, seen = torch.zeros((), device=device), 0
    for images, labels in loader:
        correct += (model(images.to(device)).argmax(-1) == labels.to(device)).sum()
        seen += len(labels)
    return mean_over_ranks(correct, seen, device)


def mean_over_ranks(total, seen, device):
    both = torch.stack([total.double(), torch.tensor(seen, dtype=torch.float64, device=device)])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()
