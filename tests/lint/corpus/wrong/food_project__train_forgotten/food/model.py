# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import EfficientNet_B0_Weights, efficientnet_b0


class Normalised(nn.Module):
    """Takes images in [0, 1] and hands them on standardised, so that exported models need no preprocessing."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1), persistent=False)

    def forward(self, images):
        return self.body((images - self.mean) / self.std)


def fetch_weights(env):
    if env.local_rank == 0:
        EfficientNet_B0_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
    dist.barrier()


def build_model(classes):
    net = efficientnet_b0(weights=EfficientNet_B0_Weights.IMAGENET1K_V1)
    net.classifier[1] = nn.Linear(net.classifier[1].in_features, classes)
    return nn.SyncBatchNorm.convert_sync_batchnorm(Normalised(net))
