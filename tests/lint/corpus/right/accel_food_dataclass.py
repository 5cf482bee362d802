# expect: none
"""Food-101 with Accelerate.

    accelerate launch accel_food_dataclass.py --data_dir DIR --output_dir DIR
"""
import os
from dataclasses import dataclass

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, random_split
from torchvision.datasets import Food101
from torchvision.models import EfficientNet_B0_Weights, efficientnet_b0
from torchvision.transforms import v2 as T
from transformers import HfArgumentParser


@dataclass
class Config:
    data_dir: str
    output_dir: str
    epochs: int = 12
    effective_batch: int = 256  # images of one update: all processes, all accumulated batches
    accumulate: int = 2
    lr: float = 6e-4  # for the effective batch
    warmup_share: float = 0.05
    max_norm: float = 2.0
    workers: int = 6  # of each process
    seed: int = 17
    resume: bool = False


class Progress:
    """What a checkpoint has to know beside the weights."""

    def __init__(self):
        self.epoch, self.best = 0, 0.0

    def state_dict(self):
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state):
        self.epoch, self.best = state["epoch"], state["best"]


class WithTransform(torch.utils.data.Dataset):
    def __init__(self, base, transform):
        self.base, self.transform = base, transform

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        image, label = self.base[i]
        return self.transform(image), label


def get_datasets(cfg, accelerator):
    end = [T.ToImage(), T.ToDtype(torch.float32, scale=True), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    augment = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.RandAugment(), *end])
    plain = T.Compose([T.Resize(256), T.CenterCrop(224), *end])
    with accelerator.local_main_process_first():  # the first one of a machine downloads, the others find it there
        train_full = Food101(cfg.data_dir, split="train", download=True)
        test = Food101(cfg.data_dir, split="test", transform=plain, download=True)
    n_val = len(train_full) // 10
    parts = random_split(
        train_full, [len(train_full) - n_val, n_val], generator=torch.Generator().manual_seed(cfg.seed)
    )
    return WithTransform(parts[0], augment), WithTransform(parts[1], plain), test


def get_model(accelerator):
    with accelerator.local_main_process_first():
        model = efficientnet_b0(weights=EfficientNet_B0_Weights.IMAGENET1K_V1)
    model.classifier[1] = nn.Linear(model.classifier[1].in_features, 101)
    return model


def warmup_then_linear(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(1, total - warmup))

    return factor


@torch.no_grad()
def accuracy(accelerator, model, loader):
    model.eval()
    hits, seen = 0, 0
    for images, labels in loader:
        pred = model(images).argmax(dim=-1)
        pred, labels = accelerator.gather_for_metrics((pred, labels))  # without what was repeated at the end
        hits += (pred == labels).sum()
        seen += labels.numel()
    return hits.item() / seen


def main(cfg):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=cfg.accumulate)
    set_seed(cfg.seed, device_specific=True)
    train_set, val_set, test_set = get_datasets(cfg, accelerator)

    batch = cfg.effective_batch // (accelerator.num_processes * cfg.accumulate)
    kw = dict(batch_size=batch, num_workers=cfg.workers, pin_memory=True)
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **kw)
    val_loader = DataLoader(val_set, **kw)
    test_loader = DataLoader(test_set, **kw)

    model = get_model(accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.02)
    model, optimizer, train_loader, val_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader, test_loader
    )
    updates = cfg.epochs * -(-len(train_loader) // cfg.accumulate)
    # a prepared scheduler moves on by num_processes at each update
    total = updates * accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear(int(cfg.warmup_share * total), total))
    schedule = accelerator.prepare(schedule)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    last = os.path.join(cfg.output_dir, "last")
    best_file = os.path.join(cfg.output_dir, "best.pt")
    if cfg.resume:
        accelerator.load_state(last)

    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(progress.epoch, cfg.epochs):
        train_loader.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = criterion(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), cfg.max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            loss_sum += loss.detach()
        train_loss = accelerator.reduce(loss_sum, reduction="mean").item() / len(train_loader)
        val_acc = accuracy(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: loss {train_loss:.4f}, validation accuracy {val_acc:.4f}")

        if val_acc > progress.best:
            progress.best = val_acc
            weights = accelerator.unwrap_model(model).state_dict()
            if accelerator.is_main_process:
                os.makedirs(cfg.output_dir, exist_ok=True)
                torch.save(weights, best_file)
        progress.epoch = epoch + 1
        accelerator.save_state(last)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).load_state_dict(torch.load(best_file, map_location="cpu", weights_only=True))
    accelerator.print(f"test accuracy {accuracy(accelerator, model, test_loader):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(HfArgumentParser(Config).parse_args_into_dataclasses()[0])
