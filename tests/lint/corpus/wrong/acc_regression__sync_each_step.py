# expect: sync-each-step line 23
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(seed, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True))


def train_epoch(accelerator, model, loader, optimizer):
    model.train()
    total, count = 0.0, 0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        total += float(loss) * len(x)
        count += len(x)
    sums = accelerator.reduce(torch.tensor([total, count], device=accelerator.device), reduction="sum")
    return (sums[0] / sums[1]).item()


def main():
    accelerator = Accelerator()
    loader = DataLoader(make(0, 4096), batch_size=128 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start, path = 0, "regression.pt"
    try:
        state = torch.load(path, map_location=accelerator.device, weights_only=True)
    except FileNotFoundError:
        accelerator.print("begins anew")
    else:
        accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    accelerator.wait_for_everyone()
    for epoch in range(start, 20):
        loss = train_epoch(accelerator, model, loader, optimizer)
        accelerator.print(f"epoch {epoch}: {loss:.4f}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            weights = accelerator.unwrap_model(model).state_dict()
            torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    accelerator.end_training()


if __name__ == "__main__":
    main()
