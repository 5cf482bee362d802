# expect: none
"""Damage of parcels: four grades, photographs of the belt camera."""
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import resnext50_32x4d
from torchvision.transforms import v2

from base import BaseTrainer


class DamageTrainer(BaseTrainer):
    def _view(self, split, *augment):
        steps = [v2.Resize((288, 288)), *augment, v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
                 v2.Normalize([0.42, 0.40, 0.37], [0.22, 0.21, 0.21])]
        return ImageFolder(f"{self.config['images']}/{split}", v2.Compose(steps))

    def make_data(self):
        c, rt = self.config, self.rt
        fit = self._view("fit", v2.RandomHorizontalFlip(), v2.RandomPerspective(0.2, 0.5))
        check = self._view("check")
        sampler = DistributedSampler(fit, rt.world, rt.rank, shuffle=True, seed=rt.seed)
        train = DataLoader(fit, c["batch_per_gpu"], sampler=sampler, num_workers=c["workers_per_gpu"],
                           pin_memory=True, drop_last=True)
        share = Subset(check, range(rt.rank, len(check), rt.world))
        valid = DataLoader(share, c["batch_per_gpu"], num_workers=c["workers_per_gpu"])
        return train, valid

    def make_net(self):
        net = resnext50_32x4d(num_classes=4)
        net.fc = nn.Sequential(nn.Dropout(self.config["dropout"]), net.fc)
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)

    def loss(self, batch):
        photo, grade = (t.to(self.rt.device, non_blocking=True) for t in batch)
        return nn.functional.cross_entropy(self.ddp(photo), grade)

    @torch.no_grad()
    def score(self):
        """Accuracy and the mean distance in grades, over the whole set."""
        self.net.eval()
        right = far = torch.zeros((), device=self.rt.device)
        n = 0
        for photo, grade in self.valid_data:
            grade = grade.to(self.rt.device)
            guess = self.net(photo.to(self.rt.device)).argmax(1)
            right = right + (guess == grade).sum()
            far = far + (guess - grade).abs().sum()
            n += len(grade)
        right, far, n = self.rt.total(right, far, n)
        return {"accuracy": right / n, "distance": far / n}
