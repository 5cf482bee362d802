"""A loop by hand with timm's loader: its transforms, its collation, its prefetcher, its own shuffling."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data.loader import create_loader
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from peers.task import Side, Task, autocast, image_set, looped, make_model, make_optimizer, sample_set


def build(task: Task) -> Side:
    model = make_model(task)
    optimizer, cast = make_optimizer(task, model), autocast(task)
    trained, found = model, image_set(task)
    if task.ranks > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        trained = DistributedDataParallel(model)
    workers = task.workers // task.ranks
    loader = create_loader(
        sample_set(task),  # type: ignore[arg-type]
        found.shape,
        batch_size=task.mine,
        is_training=True,
        no_aug=task.net == "mnist" or task.plain,  # else timm's crop of random size and aspect, and its flip
        color_jitter=0.0,
        interpolation="bilinear",
        mean=found.mean,
        std=found.std,
        num_workers=workers,
        persistent_workers=workers > 0,
        distributed=task.ranks > 1,
        device=torch.device("cpu"),
    )

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with cast():
            loss = F.cross_entropy(trained(images), labels)
        loss.backward()
        optimizer.step()

    return Side(model, looped(step, (pair for _ in range(1000) for pair in loader)))
