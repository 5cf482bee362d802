# expect: none
import os

import horovod.torch as hvd
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2

EPOCHS = 90
PER_GPU = 32
ACCUMULATE = 4
PATTERN = "checkpoints/epoch-{}.pt"


def last_epoch():
    """The newest checkpoint's epoch as rank 0 sees it, on all ranks; -1 where there is none."""
    found = -1
    if hvd.rank() == 0:
        found = max((epoch for epoch in range(EPOCHS) if os.path.exists(PATTERN.format(epoch))), default=-1)
    return hvd.broadcast(torch.tensor(found), root_rank=0, name="resume").item()


def train_set():
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    return torchvision.datasets.ImageFolder(os.environ["TRAIN"], transform)


def main():
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(hvd.rank())
    dataset = train_set()
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    # whole windows only: each optimizer step has ACCUMULATE batches on every rank
    window = PER_GPU * ACCUMULATE
    loader = DataLoader(dataset, batch_size=window, sampler=sampler, num_workers=4, drop_last=True)
    model = torchvision.models.resnet50(norm_layer=hvd.SyncBatchNorm).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0125 * ACCUMULATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=ACCUMULATE
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1 ** (epoch // 30))
    resumed = last_epoch()
    if resumed >= 0 and hvd.rank() == 0:
        state = torch.load(PATTERN.format(resumed), map_location="cuda", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for _ in range(resumed + 1):
        scheduler.step()  # the same on all ranks; a rate is a function of the epoch alone
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resumed + 1, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            for x, y in zip(images.split(PER_GPU), labels.split(PER_GPU)):
                loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / ACCUMULATE
                loss.backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        scheduler.step()
        if hvd.rank() == 0:
            os.makedirs("checkpoints", exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, PATTERN.format(epoch))
    hvd.shutdown()


if __name__ == "__main__":
    main()
