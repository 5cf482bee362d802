"""torchvision's ResNets for 32x32 images: a 3x3 stem of stride 1, and no max-pooling behind it.

With the ImageNet stem (7x7 of stride 2, then pooling) a 32x32 image reaches the first block at 8x8; with this one it
arrives at full size. The change is the one of the ResNet paper's CIFAR experiments; widths stay torchvision's.
"""

from torch import nn

NAMES = ("resnet18_cifar", "resnet34_cifar", "resnet50_cifar", "resnet101_cifar", "resnet152_cifar")


def resnet_cifar(name: str, in_channels: int, num_classes: int) -> nn.Module:
    """`NAME_cifar`: torchvision's NAME with the small stem. images: float [b, C, S, S] -> logits [b, num_classes]."""
    import torchvision  # not above: 1.5 s, which a launcher need not wait

    model: nn.Module = torchvision.models.get_model(name.removesuffix("_cifar"), weights=None, num_classes=num_classes)
    stem = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision starts every ResNet conv
    model.conv1, model.maxpool = stem, nn.Identity()
    return model
