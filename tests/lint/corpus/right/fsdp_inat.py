# expect: none
"""iNaturalist fine-tuning of a large ViT, sharded with FSDP. torchrun, one process a GPU."""
import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.models.vision_transformer import EncoderBlock, vit_l_16


class EqualParts(Dataset):
    """Rank's part of a set for evaluation. All parts have one length, since FSDP's forward is
    collective; an item beyond the end carries weight 0."""

    def __init__(self, base, rank, world):
        self.base, self.rank, self.world = base, rank, world

    def __len__(self):
        return -(-len(self.base) // self.world)

    def __getitem__(self, i):
        j = i * self.world + self.rank
        weight = 1.0 if j < len(self.base) else 0.0
        image, label = self.base[min(j, len(self.base) - 1)]
        return image, label, weight


def build_sets(root):
    norm = T.Normalize((0.5,) * 3, (0.5,) * 3)
    train_tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.AutoAugment(), T.ToTensor(), norm])
    val_tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])
    return ImageFolder(os.path.join(root, "train"), train_tf), ImageFolder(os.path.join(root, "val"), val_tf)


def shard(net, local):
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={EncoderBlock})
    return FSDP(net, auto_wrap_policy=policy, mixed_precision=bf16, device_id=local, sync_module_states=True,
                sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True)


def whole_state(model, optimizer):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        weights = model.state_dict()
    return weights, FSDP.full_optim_state_dict(model, optimizer, rank0_only=True)


def train_epoch(model, loader, optimizer, schedule, device):
    model.train()
    meter = torch.zeros(2, device=device)
    for image, label in loader:
        image, label = image.to(device, non_blocking=True), label.to(device, non_blocking=True)
        loss = F.cross_entropy(model(image).float(), label, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        meter[0] += loss.detach() * label.numel()
        meter[1] += label.numel()
    dist.all_reduce(meter)
    return (meter[0] / meter[1]).item()


@torch.no_grad()
def top1(model, loader, device):
    model.eval()
    hits, n = torch.zeros(2, dtype=torch.float64, device=device)
    for image, label, weight in loader:
        image, label, weight = image.to(device), label.to(device), weight.to(device)
        hits += ((model(image).argmax(1) == label) * weight).sum()
        n += weight.sum()
    both = torch.stack([hits, n])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("run_dir")
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--gpu-batch", type=int, default=16)
    p.add_argument("--lr-256", type=float, default=1e-4, help="rate for 256 images a step; goes with the real number")
    args = p.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local)
    torch.manual_seed(60 + rank)
    if rank == 0:
        os.makedirs(args.run_dir, exist_ok=True)

    train_set, val_set = build_sets(args.root)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train = DataLoader(train_set, args.gpu_batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    val = DataLoader(EqualParts(val_set, rank, world), args.gpu_batch, num_workers=8, pin_memory=True)

    net = vit_l_16(num_classes=len(train_set.classes), dropout=0.1)
    model = shard(net, local)
    rate = args.lr_256 * args.gpu_batch * world / 256
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=args.epochs * len(train))

    start = 0
    latest = os.path.join(args.run_dir, "latest.pt")
    if os.path.exists(latest):
        saved = torch.load(latest, map_location="cpu", weights_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(saved["weights"])
        optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(saved["optimizer"], model))
        schedule.load_state_dict(saved["schedule"])
        start = saved["next_epoch"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, train, optimizer, schedule, device)
        accuracy = top1(model, val, device)
        weights, optim_state = whole_state(model, optimizer)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} top1 {accuracy:.4f}", flush=True)
            torch.save({"weights": weights, "optimizer": optim_state, "schedule": schedule.state_dict(),
                        "next_epoch": epoch + 1}, latest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
