# expect: train-forgotten line 83 or 54 or 78
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import tv_tensors
from torchvision.transforms import v2

CLASSES = 21


class ConfusionMatrix:
    def __init__(self, classes, device):
        self.classes = classes
        self.matrix = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def update(self, target, prediction):
        valid = target < self.classes
        index = self.classes * target[valid] + prediction[valid]
        self.matrix += torch.bincount(index, minlength=self.classes**2).view_as(self.matrix)

    def reduce_from_all_processes(self):
        dist.all_reduce(self.matrix)

    def mean_iou(self):
        m = self.matrix.double()
        return (m.diag() / (m.sum(0) + m.sum(1) - m.diag()).clamp(min=1)).mean().item()


class VOC(torchvision.datasets.VOCSegmentation):
    def __init__(self, root, image_set, transform):
        super().__init__(root, image_set=image_set)
        self.both = transform

    def __getitem__(self, index):
        image, mask = super().__getitem__(index)
        image, mask = self.both(tv_tensors.Image(v2.functional.pil_to_tensor(image)), tv_tensors.Mask(
            v2.functional.pil_to_tensor(mask)))
        return image, mask.squeeze(0).long()


def transform(train):
    size = [v2.RandomResizedCrop(480), v2.RandomHorizontalFlip()] if train else [v2.Resize((480, 480))]
    finish = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    return v2.Compose(size + finish)


def evaluate(model, loader, device):
    model.eval()
    confusion = ConfusionMatrix(CLASSES, device)
    with torch.inference_mode():
        for image, mask in loader:
            output = model(image.to(device))["out"]
            confusion.update(mask.to(device).flatten(), output.argmax(1).flatten())
    confusion.reduce_from_all_processes()
    return confusion.mean_iou()


def main():
    dist.init_process_group("nccl")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(20 + rank)
    train_set, val_set = VOC("voc", "train", transform(True)), VOC("voc", "val", transform(False))
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, 32 // world_size, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 1, num_workers=4)

    model = torchvision.models.segmentation.fcn_resnet50(weights_backbone=None, num_classes=CLASSES)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    model.train()
    epochs = 30
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=epochs * len(train_loader), power=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for image, mask in train_loader:
            output = model(image.to(device))["out"]
            loss = nn.functional.cross_entropy(output, mask.to(device), ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        iou = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: mean IoU {iou:.4f}")
            torch.save(model.module.state_dict(), "fcn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
