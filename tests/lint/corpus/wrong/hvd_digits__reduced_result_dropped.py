# expect: reduced-result-dropped line 48 or 47 or 49 or 50
# horovodrun -np 4 python hvd_digits.py
import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 48, 5, padding=2), nn.GroupNorm(8, 48), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(48, 96, 3, padding=1), nn.GroupNorm(8, 96), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(96, 160, 3, padding=1), nn.GroupNorm(8, 160), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(2560, 10))

    def forward(self, x):
        return self.head(self.features(x))


def fetch(root):
    if hvd.local_rank() == 0:
        for part in ("train", "test"):
            datasets.SVHN(root, split=part, download=True)
    hvd.barrier()


def test(model, loader, tag):
    model.eval()
    loss = torch.tensor(0.0).cuda()
    right = torch.tensor(0.0).cuda()
    number = torch.tensor(0.0).cuda()
    with torch.no_grad():
        for crop, digit in loader:
            crop, digit = crop.cuda(), digit.cuda()
            score = model(crop)
            loss += F.cross_entropy(score, digit, reduction="sum")
            right += score.argmax(1).eq(digit).sum()
            number += len(digit)
    hvd.allreduce(loss, name=f"{tag}.loss", op=hvd.Sum)
    hvd.allreduce(right, name=f"{tag}.right", op=hvd.Sum)
    hvd.allreduce(number, name=f"{tag}.number", op=hvd.Sum)
    return (loss / number).item(), (right / number).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="svhn")
    ap.add_argument("--batch-size", type=int, default=128, help="of one process")
    ap.add_argument("--base-lr", type=float, default=0.02, help="for one process")
    ap.add_argument("--epochs", type=int, default=24)
    ap.add_argument("--checkpoint", default="hvd_digits.pt")
    args = ap.parse_args()

    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(500 + hvd.rank())
    fetch(args.root)

    scale = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.44,) * 3, (0.20,) * 3)])
    jitter = transforms.Compose([transforms.RandomCrop(32, padding=3), transforms.ColorJitter(0.2, 0.2), scale])
    train_ds = datasets.SVHN(args.root, split="train", transform=jitter)
    test_ds = datasets.SVHN(args.root, split="test", transform=scale)
    sampler = DistributedSampler(train_ds, num_replicas=hvd.size(), rank=hvd.rank())
    feed = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler, num_workers=3, pin_memory=True)
    test_part = Subset(test_ds, range(hvd.rank(), len(test_ds), hvd.size()))
    test_feed = DataLoader(test_part, batch_size=500, num_workers=2)

    model = DigitNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.2)
    begin = 0
    if hvd.rank() == 0 and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cuda", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        decay.load_state_dict(saved["decay"])
        begin = saved["epoch"]
    begin = hvd.broadcast_object(begin, root_rank=0, name="begin")
    decay.load_state_dict(hvd.broadcast_object(decay.state_dict(), root_rank=0, name="decay"))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for crop, digit in feed:
            optimizer.zero_grad()
            F.cross_entropy(model(crop.cuda(non_blocking=True)), digit.cuda(non_blocking=True)).backward()
            optimizer.step()
        decay.step()
        loss, accuracy = test(model, test_feed, "test")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: test loss {loss:.4f}, test accuracy {accuracy:.4f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "decay": decay.state_dict(), "epoch": epoch + 1}, args.checkpoint)
    hvd.shutdown()


if __name__ == "__main__":
    main()
