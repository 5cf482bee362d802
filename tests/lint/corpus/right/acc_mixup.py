# expect: none
"""Fine-grained birds with mixup, on Accelerate. `accelerate launch acc_mixup.py --data ... --out ...`"""
import argparse
import math
import os

import torch
import torch.nn.functional as F
import torchvision
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision.transforms import v2


class Progress:
    """What Accelerate does not know by itself."""

    def __init__(self):
        self.epoch = 0
        self.best = 0.0

    def state_dict(self):
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state):
        self.epoch, self.best = state["epoch"], state["best"]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume", help="folder of a saved state")
    parser.add_argument("--per-device-batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-5, help="for one process; scaled by their number")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--workers", type=int, default=4, help="per process")
    parser.add_argument("--seed", type=int, default=77)
    return parser.parse_args()


def mix(x, y, num_classes, beta):
    lam = beta.sample()
    perm = torch.randperm(x.size(0), device=x.device)
    hot = F.one_hot(y, num_classes).float()
    return lam * x + (1 - lam) * x[perm], lam * hot + (1 - lam) * hot[perm]


def build_datasets(root):
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    train = torchvision.datasets.ImageFolder(
        os.path.join(root, "train"), v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *tail]))
    val = torchvision.datasets.ImageFolder(
        os.path.join(root, "val"), v2.Compose([v2.Resize(256), v2.CenterCrop(224), *tail]))
    return train, val


def evaluate(accelerator, model, loader):
    model.eval()
    loss_sum = correct = seen = 0
    for x, y in loader:
        with torch.no_grad():
            logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        losses, preds, labels = accelerator.gather_for_metrics((losses, logits.argmax(dim=1), y))
        loss_sum += losses.sum()
        correct += (preds == labels).sum()
        seen += labels.numel()
    return (loss_sum / seen).item(), (correct / seen).item()


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accumulate,
                              log_with="tensorboard", project_dir=args.out)
    os.makedirs(args.out, exist_ok=True)
    accelerator.init_trackers("birds")
    set_seed(args.seed, device_specific=True)

    train_set, val_set = build_datasets(args.data)
    num_classes = len(train_set.classes)
    train_dl = DataLoader(train_set, batch_size=args.per_device_batch, shuffle=True, drop_last=True,
                          num_workers=args.workers, pin_memory=True)
    val_dl = DataLoader(val_set, batch_size=2 * args.per_device_batch, num_workers=args.workers, pin_memory=True)

    model = torchvision.models.swin_v2_t(weights=None, num_classes=num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * accelerator.num_processes)
    model, optimizer, train_dl, val_dl = accelerator.prepare(model, optimizer, train_dl, val_dl)

    # a prepared scheduler advances num_processes ticks for each update
    updates = args.epochs * math.ceil(len(train_dl) / args.accumulate)
    ticks = updates * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * min(1.0, t / ticks))))
    scheduler = accelerator.prepare(scheduler)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(args.resume)

    beta = torch.distributions.Beta(torch.tensor(args.mixup, device=accelerator.device),
                                    torch.tensor(args.mixup, device=accelerator.device))
    while progress.epoch < args.epochs:
        model.train()
        running = torch.zeros(2, device=accelerator.device)
        for x, y in train_dl:
            with accelerator.accumulate(model):
                mixed, soft = mix(x, y, num_classes, beta)
                loss = F.cross_entropy(model(mixed), soft)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            running[0] += loss.detach() * y.numel()
            running[1] += y.numel()
        running = accelerator.reduce(running, reduction="sum")
        val_loss, val_acc = evaluate(accelerator, model, val_dl)
        accelerator.log({"train_loss": (running[0] / running[1]).item(),
                         "val_loss": val_loss, "val_acc": val_acc}, step=progress.epoch)
        accelerator.print(f"epoch {progress.epoch}: val loss {val_loss:.4f} acc {val_acc:.4f}")
        progress.epoch += 1
        if val_acc > progress.best:
            progress.best = val_acc
            weights = accelerator.unwrap_model(model).state_dict()
            if accelerator.is_main_process:
                torch.save(weights, os.path.join(args.out, "best.pt"))
        accelerator.save_state(os.path.join(args.out, "state"))

    accelerator.end_training()


if __name__ == "__main__":
    main()
