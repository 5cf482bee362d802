# expect: normalised-twice line 49 or 27
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
ACCUMULATE = 4
EPOCHS = 25
GLOBAL_BATCH = 1024


def main():
    fabric = L.Fabric(accelerator="gpu", devices="auto", strategy="ddp", precision="16-mixed")
    fabric.launch()
    fabric.seed_everything(500, workers=True)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = datasets.ImageFolder(os.environ["FLOWERS"], transform)
    batch_size = GLOBAL_BATCH // (fabric.world_size * ACCUMULATE)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size, shuffle=True, num_workers=4, drop_last=True))

    model = models.convnext_tiny(num_classes=102, stochastic_depth_prob=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if os.path.exists("flowers.ckpt"):
        fabric.load("flowers.ckpt", state)

    for epoch in range(state["epoch"], EPOCHS):
        model.train()
        optimizer.zero_grad()
        running, batches = torch.zeros((), device=fabric.device), len(loader)
        for i, (images, labels) in enumerate(loader):
            boundary = (i + 1) % ACCUMULATE == 0 or i + 1 == batches
            size = min(ACCUMULATE, batches - i // ACCUMULATE * ACCUMULATE)
            images = (images - MEAN.to(images.device)) / STD.to(images.device)
            with fabric.no_backward_sync(model, enabled=not boundary):
                loss = nn.functional.cross_entropy(model(images), labels)
                fabric.backward(loss / size)
            running += loss.detach()
            if boundary:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        mean = fabric.all_reduce(running / batches, reduce_op="mean")
        fabric.print(f"epoch {epoch}: {mean.item():.4f}")
        state["epoch"] = epoch + 1
        fabric.save("flowers.ckpt", state)  # every rank calls it, rank 0 writes


if __name__ == "__main__":
    main()
