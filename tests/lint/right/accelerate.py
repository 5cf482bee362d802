"""Accelerate: split batches, gather_for_metrics, one main process that saves."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    transform = transforms.ToTensor()
    with accelerator.main_process_first():
        train_set = datasets.MNIST("data", train=True, download=True, transform=transform)
        test_set = datasets.MNIST("data", train=False, download=True, transform=transform)
    train_loader = DataLoader(train_set, batch_size=256, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(10):
        model.train()
        total = torch.zeros(2, device=accelerator.device)
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
        scheduler.step()
        total = accelerator.reduce(total, "sum")
        model.eval()
        correct = count = 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == labels).sum().item()
            count += len(labels)
        accelerator.print(f"epoch {epoch}: loss {total[0] / total[1]:.4f} accuracy {correct / count:.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
