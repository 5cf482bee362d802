# expect: none
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import Food101
from torchvision.transforms import v2
import torch


def transform(training):
    if training:
        steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()]
    else:
        steps = [v2.Resize(256), v2.CenterCrop(224)]
    return v2.Compose([v2.ToImage(), *steps, v2.ToDtype(torch.float32, scale=True)])


def fetch(root, env):
    if env.local_rank == 0:
        Food101(root, split="train", download=True)
    dist.barrier()


def build_loaders(opt, env):
    fetch(opt.root, env)
    train_set = Food101(opt.root, split="train", transform=transform(True))
    test_set = Food101(opt.root, split="test", transform=transform(False))
    settings = {"batch_size": opt.images_per_gpu, "num_workers": opt.workers_per_gpu, "pin_memory": True}
    train = DataLoader(
        train_set,
        sampler=DistributedSampler(train_set, env.world, env.rank),
        drop_last=True,
        **settings,
    )
    share = Subset(test_set, range(env.rank, len(test_set), env.world))
    test = DataLoader(share, shuffle=False, **settings)
    return train, test
