# expect: none
import argparse
import os

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import mobilenet_v3_large
from tqdm.auto import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--data_dir", required=True)
parser.add_argument("--output_dir", default="stonefruit")
parser.add_argument("--num_epochs", type=int, default=12)
parser.add_argument("--per_device_batch", type=int, default=32)
parser.add_argument("--learning_rate", type=float, default=3e-4, help="per process; scaled by their number")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--seed", type=int, default=99)
parser.add_argument("--resume_from")


def split(folder, fraction, seed):
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(folder), generator=g).tolist()
    cut = int(len(folder) * fraction)
    return order[cut:], order[:cut]


def loaders(args):
    norm = transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    aug = transforms.Compose([transforms.RandomResizedCrop(192), transforms.TrivialAugmentWide(),
                              transforms.ToTensor(), norm])
    plain = transforms.Compose([transforms.Resize((192, 192)), transforms.ToTensor(), norm])
    train_view = ImageFolder(args.data_dir, aug)
    eval_view = ImageFolder(args.data_dir, plain)
    train_idx, eval_idx = split(train_view, 0.15, args.seed)
    train_dl = DataLoader(Subset(train_view, train_idx), batch_size=args.per_device_batch, shuffle=True,
                          num_workers=4, drop_last=True)
    eval_dl = DataLoader(Subset(eval_view, eval_idx), batch_size=args.per_device_batch, num_workers=4)
    return train_dl, eval_dl, len(train_view.classes)


def main():
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, mixed_precision="fp16",
                              log_with="tensorboard", project_dir=args.output_dir)
    accelerator.init_trackers("stonefruit")
    set_seed(args.seed, device_specific=True)

    train_dl, eval_dl, classes = loaders(args)
    model = mobilenet_v3_large(num_classes=classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate * accelerator.num_processes)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    # prepared schedulers advance once per process, so the horizon counts every process
    updates = -(-len(train_dl) // args.accumulate) * args.num_epochs
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01,
                                                 total_iters=updates * accelerator.num_processes)
    schedule = accelerator.prepare(schedule)
    criterion = nn.CrossEntropyLoss()

    first = 0
    if args.resume_from:
        accelerator.load_state(args.resume_from)
        first = int(os.path.basename(os.path.normpath(args.resume_from)).removeprefix("epoch_")) + 1

    for epoch in range(first, args.num_epochs):
        model.train()
        running = torch.zeros((), device=accelerator.device)
        for pixels, labels in tqdm(train_dl, disable=not accelerator.is_local_main_process):
            with accelerator.accumulate(model):
                loss = criterion(model(pixels), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            running += loss.detach()
        train_loss = accelerator.reduce(running / len(train_dl), reduction="mean").item()

        model.eval()
        hits, count = 0, 0
        for pixels, labels in eval_dl:
            with torch.no_grad():
                guess = accelerator.unwrap_model(model)(pixels).argmax(dim=-1)
            guess, labels = accelerator.gather_for_metrics((guess, labels))
            hits += (guess == labels).sum()
            count += labels.numel()
        accuracy = (hits / count).item()
        accelerator.print(f"epoch {epoch}: loss {train_loss:.4f} accuracy {accuracy:.4f}")
        accelerator.log({"train_loss": train_loss, "accuracy": accuracy}, step=epoch)
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        final = accelerator.unwrap_model(model).state_dict()
        torch.save(final, os.path.join(args.output_dir, "model.pth"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
