# expect: none
"""split_batches: the loader's batch is the global one, and the prepared scheduler steps once a call."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def get_loaders(batch_size):
    normalize = transforms.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    augment = transforms.Compose([transforms.RandomCrop(32, 4), transforms.ToTensor(), normalize])
    plain = transforms.Compose([transforms.ToTensor(), normalize])
    train = datasets.CIFAR100("data", train=True, transform=augment)
    test = datasets.CIFAR100("data", train=False, transform=plain)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, num_workers=4, drop_last=True),
        DataLoader(test, batch_size=batch_size, shuffle=False, num_workers=4),
    )


class Runner:
    def __init__(self, batch_size=512, epochs=60):
        self.accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        with self.accelerator.local_main_process_first():
            datasets.CIFAR100("data", download=self.accelerator.is_local_main_process)
        torch.manual_seed(1 + self.accelerator.process_index)
        train, test = get_loaders(batch_size)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(models.shufflenet_v2_x1_0(num_classes=100))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
        self.epochs = epochs
        self.model, self.optimizer, self.train_loader, self.test_loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, train, test, scheduler
        )

    def train_epoch(self):
        self.model.train()
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
            self.optimizer.step()
        self.scheduler.step()

    @torch.no_grad()
    def test(self):
        self.model.eval()
        correct = torch.zeros((), device=self.accelerator.device)
        for x, y in self.test_loader:
            predicted, y = self.accelerator.gather_for_metrics((self.model(x).argmax(1), y))
            correct += (predicted == y).sum()
        return correct.item() / len(self.test_loader.dataset)

    def run(self):
        for epoch in range(self.epochs):
            self.train_epoch()
            self.accelerator.print(f"epoch {epoch}: {self.test():.4f}")
        self.accelerator.end_training()


if __name__ == "__main__":
    Runner().run()
