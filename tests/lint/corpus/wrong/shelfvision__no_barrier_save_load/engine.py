# expect: none
"""The training engine."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import swin_t


class Engine:
    def __init__(self, cfg, n_products, device, store):
        self.cfg, self.device, self.store = cfg, device, store
        self.net = swin_t(num_classes=n_products).to(device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[device.index])
        images_a_step = cfg.batch_per_gpu * dist.get_world_size()
        self.optim = torch.optim.AdamW(self.ddp.parameters(), lr=cfg.base_lr * images_a_step / 256)
        self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, cfg.epochs)
        self.objective = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.best = 0.0
        self.stale = 0

    def fit(self, train, val):
        first = self.store.resume(self)
        for epoch in range(first, self.cfg.epochs):
            train.sampler.set_epoch(epoch)
            self._epoch(train)
            self.plan.step()
            acc = self.accuracy(val)
            is_best = acc > self.best
            if is_best:
                self.best, self.stale = acc, 0
            else:
                self.stale += 1
            self.store.save(self, epoch, is_best)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} val {acc:.4f} best {self.best:.4f}")
            if self.stale >= self.cfg.patience:
                break

    def _epoch(self, train):
        self.ddp.train()
        for crops, labels in train:
            crops = crops.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.objective(self.ddp(crops), labels)
            self.optim.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 5.0)
            self.optim.step()

    @torch.no_grad()
    def accuracy(self, loader):
        self.net.eval()
        counts = torch.zeros(2, device=self.device)
        for crops, labels in loader:
            crops, labels = crops.to(self.device), labels.to(self.device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                predicted = self.net(crops).argmax(1)
            counts[0] += (predicted == labels).sum()
            counts[1] += labels.numel()
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()
