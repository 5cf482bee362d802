"""Small networks without batch normalisation, and torchvision's ResNets for 32x32 images. All return logits.

With the ImageNet stem (7x7 of stride 2, then pooling) a 32x32 image reaches the first block at 8x8; with a 3x3 stem of
stride 1, as in the ResNet paper's CIFAR experiments, it arrives at full size. Widths stay torchvision's.
"""

from collections import OrderedDict

from torch import nn

from lockstep.errors import UserError


def require_side(name: str, image_size: int, least: int) -> None:
    """Raise UserError where a model is built for smaller images than it takes."""
    if image_size < least:
        raise UserError(
            f"model {name} needs images of at least {least}x{least}, and these are {image_size}x{image_size}",
            f"Give --image-size {least} or more, or another --model.",
        )


def mlp(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Two linear layers, 256 units between. images: float [b, C, S, S] -> logits [b, num_classes]."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


def digits_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Two 3x3 convolutions, one pooling, two linear layers: small enough for 8x8 digits in seconds on one core."""
    require_side("digits_net", image_size, 2)
    return nn.Sequential(
        nn.Conv2d(in_channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (image_size // 2) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def mnist_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """The network of PyTorch's MNIST example: two 3x3 convolutions (32, 64), dropout 0.25, 128 units, dropout 0.5.

    1,199,882 parameters at 28x28; parameter names and shapes are the example's, so its weights load here.
    Source: github.com/pytorch/examples, mnist/main.py.
    """
    require_side("mnist_net", image_size, 6)
    side = (image_size - 4) // 2  # two unpadded 3x3 convolutions, then 2x2 pooling
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(in_channels, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        dropout1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * side**2, 128),
        relu3=nn.ReLU(),
        dropout2=nn.Dropout(0.5),
        fc2=nn.Linear(128, num_classes),
    )
    return nn.Sequential(layers)


NAMES = ("resnet18_cifar", "resnet34_cifar", "resnet50_cifar", "resnet101_cifar", "resnet152_cifar")


def resnet_cifar(name: str, in_channels: int, num_classes: int) -> nn.Module:
    """`NAME_cifar`: torchvision's NAME with the small stem. images: float [b, C, S, S] -> logits [b, num_classes]."""
    import torchvision  # not above: 1.5 s, which a launcher need not wait

    model: nn.Module = torchvision.models.get_model(name.removesuffix("_cifar"), weights=None, num_classes=num_classes)
    stem = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision starts every ResNet conv
    model.conv1, model.maxpool = stem, nn.Identity()
    return model
