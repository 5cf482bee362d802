# expect: clip-before-unscale line 86
import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2


class Progress:
    """What a checkpoint has to know beside weights and optimizer."""

    def __init__(self):
        self.epoch = 0
        self.best = 0.0

    def state_dict(self):
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state):
        self.epoch, self.best = state["epoch"], state["best"]


def loaders(root, batch_size, workers):
    common = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    train = datasets.ImageFolder(f"{root}/train", v2.Compose([v2.RandomResizedCrop(224), *common]))
    val = datasets.ImageFolder(f"{root}/val", v2.Compose([v2.Resize(256), v2.CenterCrop(224), *common]))
    return (
        DataLoader(train, batch_size, shuffle=True, num_workers=workers, drop_last=True),
        DataLoader(val, 128, num_workers=workers),
        len(train.classes),
    )


def evaluate(accelerator, model, loader):
    model.eval()
    hits = torch.zeros(2, device=accelerator.device)
    for images, labels in loader:
        with torch.inference_mode():
            predicted = model(images).argmax(-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        hits[0] += (predicted == labels).sum()
        hits[1] += labels.numel()
    return (hits[0] / hits[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1024, help="images per optimizer step on all processes")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--output", default="out")
    args = parser.parse_args()

    config = ProjectConfiguration(project_dir=args.output, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate, mixed_precision="fp16", project_config=config
    )
    set_seed(0, device_specific=True)
    batch_size = args.batch // (args.accumulate * accelerator.num_processes)
    train_loader, val_loader, classes = loaders(args.root, batch_size, workers=4)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.efficientnet_b0(num_classes=classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume is not None:
        accelerator.load_state(args.resume)
        config.iteration = progress.epoch  # the next checkpoint's number

    for epoch in range(progress.epoch, args.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: {accuracy:.4f}")
        progress.epoch = epoch + 1
        if accuracy > progress.best:
            progress.best = accuracy
            if accelerator.is_main_process:
                os.makedirs(args.output, exist_ok=True)
                weights = accelerator.unwrap_model(model).state_dict()
                torch.save(weights, os.path.join(args.output, "best.pt"))
        accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
