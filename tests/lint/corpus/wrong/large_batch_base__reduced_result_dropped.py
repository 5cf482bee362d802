# expect: reduced-result-dropped line 73 or 74
"""Large batches on Places365 with linear warmup. One process per GPU, started by torchrun on every node."""
import abc
import argparse
import os
import typing as t

import torch
import torch.distributed as dist
import torchvision
from torch import nn, optim
from torch.utils import data
from torchvision import transforms as T


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    out = value.detach().clone()
    dist.all_reduce(out)
    return out / dist.get_world_size()


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    out = value.detach().clone()
    dist.all_reduce(out)
    return out


class BaseTrainer(abc.ABC):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.net = self.build_model().to(self.device)
        self.model = nn.parallel.DistributedDataParallel(self.net, device_ids=[self.device.index])
        self.loader, self.val_loader = self.build_loaders()
        self.optimizer, self.scheduler = self.build_optimizer()
        self.epoch = 0

    @abc.abstractmethod
    def build_model(self) -> nn.Module: ...

    @abc.abstractmethod
    def build_loaders(self) -> t.Tuple[data.DataLoader, data.DataLoader]: ...

    @abc.abstractmethod
    def build_optimizer(self): ...

    def train(self) -> float:
        self.loader.sampler.set_epoch(self.epoch)
        self.model.train()
        total = torch.zeros((), device=self.device)
        for batch in self.loader:
            x, y = (b.to(self.device, non_blocking=True) for b in batch)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            total += loss.detach()
        average = mean_over_ranks(total / len(self.loader))
        return average.item()

    @torch.inference_mode()
    def validate(self) -> float:
        self.net.eval()
        counts = torch.zeros(2, device=self.device)
        for batch in self.val_loader:
            x, y = (b.to(self.device, non_blocking=True) for b in batch)
            counts[0] += self.net(x).argmax(1).eq(y).sum()
            counts[1] += y.numel()
        sum_over_ranks(counts)
        return (counts[0] / counts[1]).item()

    def run(self) -> None:
        for self.epoch in range(self.args.epochs):
            loss = self.train()
            message = f"epoch {self.epoch}: train loss {loss:.4f}"
            if self.epoch % self.args.validate_every == 0 or self.epoch == self.args.epochs - 1:
                accuracy = self.validate()
                message += f", validation accuracy {accuracy:.4f}"
            if self.rank == 0:
                print(message, flush=True)
        if self.rank == 0:
            torch.save(self.net.state_dict(), self.args.weights)


class PlacesTrainer(BaseTrainer):
    def build_model(self):
        net = torchvision.models.resnet50(num_classes=365, zero_init_residual=True)
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)

    def build_loaders(self):
        a = self.args
        norm = T.Normalize([0.458, 0.441, 0.408], [0.269, 0.266, 0.285])
        train = torchvision.datasets.Places365(a.root, "train-standard", small=True, transform=T.Compose(
            [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm]))
        val = torchvision.datasets.Places365(a.root, "val", small=True, transform=T.Compose(
            [T.CenterCrop(224), T.ToTensor(), norm]))
        sampler = data.DistributedSampler(train, self.world, self.rank, shuffle=True)
        train = data.DataLoader(train, a.batch_size, sampler=sampler, num_workers=a.workers, drop_last=True,
                                pin_memory=True)
        val = data.Subset(val, range(self.rank, len(val), self.world))
        return train, data.DataLoader(val, a.batch_size, num_workers=a.workers)

    def build_optimizer(self):
        a = self.args
        lr = a.lr * self.world
        opt = optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
        steps = len(self.loader)
        warm = optim.lr_scheduler.LinearLR(opt, start_factor=1 / self.world, total_iters=5 * steps)
        rest = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=(a.epochs - 5) * steps)
        return opt, optim.lr_scheduler.SequentialLR(opt, [warm, rest], milestones=[5 * steps])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("weights", help="file to write at the end")
    parser.add_argument("--batch-size", type=int, default=256, help="per GPU")
    parser.add_argument("--lr", type=float, default=0.1, help="for one GPU; grows linearly with their number")
    parser.add_argument("--workers", type=int, default=8, help="per GPU")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--validate-every", type=int, default=2)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    PlacesTrainer(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
