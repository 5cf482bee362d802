# expect: eval-padding-counted line 51 or 52 or 53 or 54
"""Stanford Cars with Hugging Face Accelerate.

accelerate launch --multi_gpu accel_cars.py --root /data/cars --project-dir runs/cars-01
"""
import argparse
import math
import os

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm.auto import tqdm
from transformers import get_cosine_schedule_with_warmup

IMAGENET = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def build_transforms(size):
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(**IMAGENET)]
    train = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide(), *tail])
    val = v2.Compose([v2.Resize(int(size * 1.15)), v2.CenterCrop(size), *tail])
    return train, val


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--project-dir", required=True)
    parser.add_argument("--arch", default="convnext_tiny.fb_in1k")
    parser.add_argument("--size", type=int, default=288)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--per-device-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=6e-5, help="for one device; scaled by the number of processes")
    parser.add_argument("--workers", type=int, default=4, help="per process")
    parser.add_argument("--warmup-ratio", type=float, default=0.05)
    return parser.parse_args()


def run_validation(accelerator, model, loader):
    model.eval()
    right = torch.zeros((), device=accelerator.device)
    count = 0
    for images, labels in loader:
        with torch.no_grad():
            guesses = model(images).argmax(dim=-1)
        guesses, labels = accelerator.gather((guesses, labels))
        right += (guesses == labels).sum()
        count += labels.shape[0]
    return right.item() / count


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16", log_with="tensorboard", project_dir=args.project_dir)
    set_seed(77, device_specific=True)
    if accelerator.is_main_process:
        os.makedirs(args.project_dir, exist_ok=True)
    accelerator.init_trackers("cars")

    train_tf, val_tf = build_transforms(args.size)
    train_set = ImageFolder(os.path.join(args.root, "train"), train_tf)
    val_set = ImageFolder(os.path.join(args.root, "test"), val_tf)
    train_dl = DataLoader(train_set, batch_size=args.per_device_batch, shuffle=True,
                          num_workers=args.workers, drop_last=True)
    val_dl = DataLoader(val_set, batch_size=args.per_device_batch * 2, num_workers=args.workers)

    with accelerator.main_process_first():
        model = timm.create_model(args.arch, pretrained=True, num_classes=len(train_set.classes), drop_path_rate=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * accelerator.num_processes, weight_decay=0.05)

    # the prepared scheduler moves num_processes steps at a time: count the batches before they are shared out
    total = args.epochs * len(train_dl)
    scheduler = get_cosine_schedule_with_warmup(optimizer, math.ceil(total * args.warmup_ratio), total)

    model, optimizer, train_dl, val_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, val_dl, scheduler)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        epoch_loss = torch.zeros((), device=accelerator.device)
        for images, labels in tqdm(train_dl, disable=not accelerator.is_local_main_process):
            loss = criterion(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            epoch_loss += loss.detach()
        mean_loss = accelerator.reduce(epoch_loss / len(train_dl), reduction="mean").item()
        accuracy = run_validation(accelerator, model, val_dl)
        accelerator.log({"train_loss": mean_loss, "val_accuracy": accuracy}, step=epoch)
        accelerator.print(f"epoch {epoch}: {mean_loss:.4f} {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            weights = accelerator.unwrap_model(model).state_dict()
            accelerator.save(weights, os.path.join(args.project_dir, "best.pt"))

    accelerator.end_training()


if __name__ == "__main__":
    main()
