# expect: none
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.detection import MeanAveragePrecision


class Boxes(torch.utils.data.Dataset):
    def __init__(self, root):
        self.root = root
        self.names = sorted(name[:-4] for name in os.listdir(root) if name.endswith(".jpg"))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        path = os.path.join(self.root, self.names[index])
        image = torchvision.io.decode_image(path + ".jpg").float() / 255
        target = torch.load(path + ".pt", map_location="cpu", weights_only=True)
        return index, image, target


def collate(samples):
    return tuple(zip(*samples))


@torch.no_grad()
def evaluate(model, dataset, device, world_size):
    """COCO's mAP of all images, on rank 0; results stand under the image's number, so padding overwrites itself."""
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, shuffle=False), collate_fn=collate)
    model.eval()
    mine = {}
    for indices, images, targets in loader:
        found = model([image.to(device) for image in images])
        for index, boxes, target in zip(indices, found, targets):
            mine[index] = ({name: value.cpu() for name, value in boxes.items()}, target)
    parts = [None] * world_size
    dist.all_gather_object(parts, mine)
    if dist.get_rank() != 0:
        return None
    everything = {}
    for part in parts:
        everything.update(part)
    metric = MeanAveragePrecision(sync_on_compute=False)
    metric.update([pair[0] for pair in everything.values()], [pair[1] for pair in everything.values()])
    return metric.compute()["map"].item()


def main():
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(300 + rank)
    train_set, val_set = Boxes("boxes/train"), Boxes("boxes/val")
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 16 // world_size, sampler=sampler, num_workers=4, collate_fn=collate)
    model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model.to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [16, 22])
    for epoch in range(26):
        sampler.set_epoch(epoch)
        model.train()
        for _, images, targets in loader:
            images = [image.to(device) for image in images]
            targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
            loss = sum(model(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        scheduler.step()
        precision = evaluate(model, val_set, device, world_size)
        if rank == 0:
            print(f"epoch {epoch}: mAP {precision:.4f}")
            torch.save(model.module.state_dict(), "boxes.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
