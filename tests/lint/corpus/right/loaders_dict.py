# expect: none
"""Transfer learning tutorial: ants and bees, on several GPUs.

torchrun --standalone --nproc_per_node=2 loaders_dict.py --data-dir hymenoptera --save-to runs/ants
"""
import argparse
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torchvision import datasets, models, transforms

data_transforms = {
    "train": transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]),
    "val": transforms.Compose([
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]),
}


def get_loaders(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    image_datasets = {
        phase: datasets.ImageFolder(os.path.join(args.data_dir, phase), data_transforms[phase])
        for phase in ("train", "val")
    }
    class_names = image_datasets["train"].classes
    val_share = torch.utils.data.Subset(image_datasets["val"], range(rank, len(image_datasets["val"]), world))
    train_sampler = torch.utils.data.DistributedSampler(image_datasets["train"], seed=args.seed)
    dataloaders = {
        "train": torch.utils.data.DataLoader(
            image_datasets["train"],
            batch_size=args.batch_size,
            sampler=train_sampler,
            num_workers=2,
            pin_memory=True,
        ),
        "val": torch.utils.data.DataLoader(
            val_share,
            batch_size=args.batch_size,
            num_workers=2,
            pin_memory=True,
        ),
    }
    return dataloaders, class_names


def build_model(num_classes, local_rank):
    weights = models.ResNet18_Weights.IMAGENET1K_V1
    if local_rank == 0:
        models.resnet18(weights=weights)
    dist.barrier()
    model = models.resnet18(weights=weights)
    model.fc = nn.Linear(model.fc.in_features, num_classes)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(torch.device("cuda", local_rank))
    return DDP(model, device_ids=[local_rank])


def train_model(model, dataloaders, criterion, optimizer, scheduler, device, args):
    since = time.time()
    best_acc, best_weights = 0.0, copy.deepcopy(model.module.state_dict())

    for epoch in range(args.epochs):
        line = [f"Epoch {epoch}/{args.epochs - 1}"]
        for phase in ["train", "val"]:
            if phase == "train":
                dataloaders["train"].sampler.set_epoch(epoch)
                model.train()
                network = model
            else:
                model.eval()
                network = model.module  # the processes may have different numbers of batches here

            totals = torch.zeros(3, device=device)  # loss, correct, seen
            for inputs, labels in dataloaders[phase]:
                inputs = inputs.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = network(inputs)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                totals[0] += loss.detach() * inputs.size(0)
                totals[1] += torch.sum(outputs.argmax(1) == labels)
                totals[2] += inputs.size(0)
            if phase == "train":
                scheduler.step()

            dist.all_reduce(totals, op=dist.ReduceOp.SUM)
            loss_sum, correct, seen = totals.tolist()
            line.append(f"{phase} loss {loss_sum / seen:.4f} acc {correct / seen:.4f}")
            if phase == "val" and correct / seen > best_acc:
                best_acc = correct / seen
                best_weights = copy.deepcopy(model.module.state_dict())
        if dist.get_rank() == 0:
            print(" | ".join(line))

    if dist.get_rank() == 0:
        print(f"Training took {time.time() - since:.0f}s, best val acc {best_acc:.4f}")
    model.module.load_state_dict(best_weights)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--save-to", required=True)
    parser.add_argument("--batch-size", type=int, default=8, help="images per GPU and step")
    parser.add_argument("--lr", type=float, default=0.001, help="for a single GPU, scaled linearly")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    device = torch.device("cuda", local_rank)
    torch.manual_seed(args.seed + dist.get_rank())  # DDP hands out rank 0's weights

    dataloaders, class_names = get_loaders(args)
    model = build_model(len(class_names), local_rank)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * dist.get_world_size(), momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    model = train_model(model, dataloaders, criterion, optimizer, scheduler, device, args)

    if dist.get_rank() == 0:
        os.makedirs(args.save_to, exist_ok=True)
        torch.save({"weights": model.module.state_dict(), "classes": class_names},
                   os.path.join(args.save_to, "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
