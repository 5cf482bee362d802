"""Models by name: shapes, fresh weights from the seed, one channel, small images, and names that nothing answers to."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lockstep import models
from lockstep.checkpoint.weights import digest
from lockstep.errors import UserError

TIMM = importlib.util.find_spec("timm") is not None


def _build(name: str, channels: int = 3, size: int = 32, classes: int = 7) -> nn.Module:
    torch.manual_seed(3)
    return models.build(name, in_channels=channels, num_classes=classes, image_size=size)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("mlp", 1, 8),
        ("digits_net", 1, 8),
        ("mnist_net", 1, 28),
        ("resnet18_cifar", 3, 32),
        ("speed_net", 3, 32),
        ("resnet18", 3, 32),
        ("mobilenet_v3_small", 1, 32),
        ("googlenet", 3, 32),
        ("densenet121", 4, 32),
        ("vit_b_16", 3, 32),
    ],
)
def test_a_model_maps_its_images_to_logits_and_learns_from_them(name: str, channels: int, size: int) -> None:
    model = _build(name, channels, size)
    assert model.training
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 7)
    F.cross_entropy(logits, torch.tensor([0, 6])).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 12)])
def test_whitened_patches_are_uncorrelated_and_nothing_trains_the_filters(channels: int, size: int) -> None:
    model = _build("speed_net", channels, size)
    generator = torch.Generator().manual_seed(0)
    smooth = torch.randn(200, channels, size + 2, size + 2, generator=generator)
    images = F.avg_pool2d(smooth, 3, stride=1) * 3  # neighbours look alike, as in photographs
    model.fit_to(images)
    first = model.whiten(images).detach().transpose(0, 1).flatten(1)
    half = len(first) // 2
    assert torch.equal(first[:half], -first[half:])
    covariance = (first[:half] @ first[:half].T / first.shape[1]).fill_diagonal_(0)
    assert covariance.abs().max() < 0.01
    assert ((first[:half] ** 2).mean(1) > 0.9).all()
    before = model.whiten.weight.clone()
    F.cross_entropy(model(images), torch.zeros(200, dtype=torch.int64)).backward()
    assert model.whiten.weight.grad is None
    assert model.whiten.bias.grad.abs().sum() > 0
    assert torch.equal(model.whiten.weight, before)


def test_every_own_name_is_listed_and_known() -> None:
    for name in ("mlp", "digits_net", "mnist_net", "resnet18_cifar", "resnet50_cifar"):
        assert name in models.names()
    for name in (*models.names(), *torchvision.models.list_models(module=torchvision.models)):
        models.check(name)


@pytest.mark.parametrize("name", ["digits_net", "resnet18_cifar", "mobilenet_v3_small"])
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    assert digest(_build(name, 1)) == digest(_build(name, 1))
    torch.manual_seed(4)
    assert digest(models.build(name, in_channels=1, num_classes=7, image_size=32)) != digest(_build(name, 1))


def test_mnist_net_is_the_pytorch_examples() -> None:
    model = _build("mnist_net", 1, 28, 10)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "conv1.weight": (32, 1, 3, 3),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 3, 3),
        "conv2.bias": (64,),
        "fc1.weight": (128, 9216),
        "fc1.bias": (128,),
        "fc2.weight": (10, 128),
        "fc2.bias": (10,),
    }
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]
    images, labels = torch.randn(4, 1, 28, 28), torch.tensor([1, 2, 3, 4])
    p = dict(model.named_parameters())
    x = F.relu(F.conv2d(images, p["conv1.weight"], p["conv1.bias"]))
    x = F.relu(F.conv2d(x, p["conv2.weight"], p["conv2.bias"]))
    x = torch.flatten(F.max_pool2d(x, 2), 1)
    x = F.linear(F.relu(F.linear(x, p["fc1.weight"], p["fc1.bias"])), p["fc2.weight"], p["fc2.bias"])
    loss = F.nll_loss(F.log_softmax(x, dim=1), labels)
    torch.testing.assert_close(F.cross_entropy(model.eval()(images), labels), loss)


def test_resnet_cifar_is_torchvisions_behind_a_stem_that_keeps_the_size() -> None:
    ours, theirs = _build("resnet18_cifar"), torchvision.models.resnet18(num_classes=7)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) - 64 * 3 * (49 - 9)
    seen = []
    ours.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    ours(torch.randn(2, 3, 32, 32))
    assert seen == [(2, 64, 32, 32)]


def test_a_grey_image_is_the_same_image_in_three_channels() -> None:
    grey, colour = _build("resnet18", 1).eval(), _build("resnet18", 3).eval()
    x = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(grey(x), colour(x.expand(2, 3, 32, 32)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [("resnet81", "resnet18"), ("mnist-net", "mnist_net"), ("vit_b_23", "vit_b_32"), ("zzzzzz", "zzzzzz")],
)
def test_an_unknown_name_offers_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.check(name)
    with pytest.raises(UserError, match="unknown model"):
        _build(name)


@pytest.mark.parametrize(
    ("name", "size"), [("alexnet", 32), ("vit_b_16", 40), ("maxvit_t", 32), ("mnist_net", 4), ("digits_net", 1)]
)
def test_images_that_do_not_fit_are_a_clear_error(name: str, size: int) -> None:
    with pytest.raises(UserError, match=f"{name} [^$]*{size}x{size}[^$]*--image-size"):
        _build(name, 3, size)


def test_the_fit_check_leaves_random_numbers_buffers_and_mode_alone() -> None:
    torch.manual_seed(3)
    bare = torchvision.models.resnet18(num_classes=7)
    after = torch.rand(1)
    model = _build("resnet18")
    assert torch.equal(torch.rand(1), after)
    assert digest(model) == digest(bare)
    assert all(module.training for module in model.modules())


def test_a_factory_gets_what_its_signature_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factories_of_models.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, num_classes, in_channels=3):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(in_channels, num_classes))\n"
        "def fixed():\n"
        "    return nn.Linear(5, 5)\n"
        "def keywords(**options):\n"
        "    return nn.Linear(1, options['num_classes'])\n"
        "def wrong():\n"
        "    return 3\n"
        "number = 4\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    net = _build("factories_of_models:Net", 2)
    assert (net[1].in_features, net[1].out_features) == (2, 7)
    assert _build("factories_of_models:fixed").out_features == 5
    assert _build("factories_of_models:keywords").out_features == 7
    for name, message in (("wrong", "returned an int"), ("number", "is an int"), ("nett", "nett")):
        with pytest.raises(UserError, match=message):
            _build(f"factories_of_models:{name}")
    with pytest.raises(UserError, match="no_such_module"):
        models.check("no_such_module:net")
    assert _build("torchvision.models:resnet18").fc.out_features == 7


def test_lazy_layers_get_their_shapes_and_keyed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_models.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Dropout(0.5).eval())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(_build("lazy_models:net"))
    assert found[0][1].weight.shape == (4, 3 * 32 * 32)
    assert digest(found[0]) == digest(found[1])
    assert [module.training for module in found[0].children()] == [True, True, True, False]
    assert found[0][2].num_batches_tracked == 0


@pytest.mark.skipif(not TIMM, reason="timm is not installed")
def test_timm_names_with_and_without_prefix() -> None:
    assert type(_build("resnet18")).__module__.startswith("torchvision")
    assert type(_build("timm/resnet18", 1)).__module__.startswith("timm")
    assert _build("vit_tiny_patch16_224", 1)(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    with pytest.raises(UserError, match="resnet18"):
        models.check("timm/resnet81")


@pytest.mark.skipif(not TIMM, reason="timm is not installed")
def test_a_size_that_one_of_timm_s_cannot_take_is_refused() -> None:
    with pytest.raises(UserError, match=r"model test_vit can't take 1x33x33 images: .*divisible by patch size"):
        models.build("timm/test_vit", in_channels=1, num_classes=10, image_size=33)
    for name in ("test_vit", "test_convnext", "test_resnet"):
        models.build(f"timm/{name}", in_channels=3, num_classes=10, image_size=224)


def test_without_timm_its_names_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("timm/resnet18", "vit_tiny_patch16_224"):
        with pytest.raises(UserError, match=r"pip install 'lockstep-torch\[timm\]'"):
            models.check(name)
