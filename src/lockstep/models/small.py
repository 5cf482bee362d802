"""Small networks: a multilayer perceptron, one for 8x8 digits, the two-conv MNIST net and LeNet-5.

All return logits, so that cross-entropy is their loss (log-softmax and the negative log-likelihood in one). None has
batch normalisation: what they learn does not depend on how a batch is shared out.
"""

from collections import OrderedDict

from torch import nn

from lockstep.errors import UserError


def _require_side(name: str, image_size: int, least: int) -> None:
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
    _require_side("digits_net", image_size, 2)
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
    _require_side("mnist_net", image_size, 6)
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


def lenet5(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """LeNet-5 with tanh and average pooling; smaller images than its 32x32 are padded, as the paper does with 28x28.

    Differences from the paper: plain pooling without weights, full connections between the convolutions, and a linear
    layer on top. Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    padding = max(0, 32 - image_size + 1) // 2
    side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 5, padding=padding),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, num_classes),
    )
