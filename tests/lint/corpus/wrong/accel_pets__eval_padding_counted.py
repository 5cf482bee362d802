# expect: eval-padding-counted line 81 or 82 or 83
"""Oxford pets with Accelerate:  accelerate launch accel_pets.py --cache /local/pets"""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision import models, transforms
from torchvision.datasets import OxfordIIITPet
from tqdm.auto import tqdm


def datasets(cache, accelerator):
    if accelerator.is_local_main_process:
        for split in ("trainval", "test"):
            OxfordIIITPet(cache, split=split, download=True)
    accelerator.wait_for_everyone()
    weights = models.ResNet50_Weights.IMAGENET1K_V2
    augment = transforms.Compose([
        transforms.RandomResizedCrop(224, scale=(0.35, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    return (OxfordIIITPet(cache, split="trainval", transform=augment),
            OxfordIIITPet(cache, split="test", transform=weights.transforms()))


def make_model():
    net = models.resnet50(weights=models.ResNet50_Weights.IMAGENET1K_V2)
    net.fc = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(net.fc.in_features, 37))
    return net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", required=True, help="a folder of this machine")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--per-device-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4, help="for one process; multiplied by their number")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--output", default="pets.pt")
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(args.seed)
    train_set, test_set = datasets(args.cache, accelerator)
    train_dl = DataLoader(train_set, batch_size=args.per_device_batch, shuffle=True, num_workers=4, drop_last=True)
    eval_dl = DataLoader(test_set, batch_size=args.per_device_batch, num_workers=4)
    with accelerator.local_main_process_first():    # the weights are downloaded once on a machine
        model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * accelerator.num_processes)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    set_seed(args.seed + 1, device_specific=True)
    # the prepared scheduler advances num_processes times in each call
    length = args.epochs * len(train_dl) * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=length)
    scheduler = accelerator.prepare(scheduler)
    criterion = torch.nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        train_dl.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for images, targets in tqdm(train_dl, disable=not accelerator.is_local_main_process):
            loss = criterion(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        mean_loss = accelerator.reduce(total / len(train_dl), reduction="mean").item()

        model.eval()
        correct = seen = 0
        for images, targets in eval_dl:
            with torch.no_grad():
                guesses = model(images).argmax(dim=-1)
            guesses, targets = accelerator.gather((guesses, targets))
            correct += (guesses == targets).sum().item()
            seen += targets.shape[0]
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.4f}, accuracy {correct / seen:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), args.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
