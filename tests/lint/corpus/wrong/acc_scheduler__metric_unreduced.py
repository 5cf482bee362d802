# expect: metric-unreduced line 37
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

EPOCHS = 15
GLOBAL_BATCH = 512


def linear_decay(total):
    return lambda step: max(0.0, 1.0 - step / total)


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(77, device_specific=True)
    with accelerator.main_process_first():
        data = datasets.FashionMNIST("data", download=True, transform=transforms.ToTensor())
    loader = DataLoader(data, GLOBAL_BATCH // accelerator.num_processes, shuffle=True, num_workers=2, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    # A prepared scheduler takes num_processes steps at each call. The loader here is not prepared yet, so it is
    # num_processes times longer than what each process will see: both together are right.
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, linear_decay(EPOCHS * len(loader)))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(EPOCHS):
        model.train()
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), "fashion.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
