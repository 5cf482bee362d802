"""Published weights: files in either format where the libraries keep them, one download a host, and images to match."""

import hashlib
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from lockstep import models
from lockstep.checkpoint.weights import Card, digest
from lockstep.commands.shared.arguments import planned
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.data.picture_set import centre_crop
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.models.published_weights import Weights, converted, find
from lockstep.training import pretrained
from lockstep.training.assemble import assemble
from tests.data.formats import server
from tests.journals import read
from tests.ranks import run_ranks
from tests.training.test_resume import end_of, trained

pytest.importorskip("timm")
SINGLE = World.single()
NET, TIMM_NET = "shufflenet_v2_x0_5", "test_resnet.r160_in1k"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch.hub keeps its files, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 4)):
        for name in ("ants", "bees", "cats"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                Image.fromarray(draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    return tmp_path / "photos"


def config_for(photos: Path, model: str, **more: Any) -> Config:
    return Config(
        recipe="folder",
        epochs=2,
        batch_size=8,
        exact=2,
        data=DataConfig(dataset="folder", resized_crop=True, image_size=64),
        model=ModelConfig(model=model, **more),
        optim=OptimConfig(lr=0.01, layer_decay=0.7, head_lr=0.05),
        execution=Execution(device="cpu", data_dir=str(photos), loader="streaming", workers=0),
        recovery=Recovery(checkpoint_every="2steps", hang_timeout=60),
    )


def published(model: str) -> dict[str, torch.Tensor]:
    """A network with the published head, as somebody might have saved it."""
    torch.manual_seed(4)
    if "." in model:
        net: nn.Module = pytest.importorskip("timm").create_model(model, num_classes=1000)
    else:
        import torchvision

        net = torchvision.models.get_model(model)
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def same_but_head(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == state.keys()
    unlike = {name for name in found if not torch.equal(found[name], state[name])}
    assert unlike == {"fc.weight", "fc.bias"}
    assert len(found["fc.bias"]) == 3


def test_a_file_that_torch_hub_has_by_its_checksum(hub: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, whole = published(NET), hub / "whole.pth"
    torch.save(state, whole)
    name = f"net-{hashlib.sha256(whole.read_bytes()).hexdigest()[:8]}.pth"
    found = replace(find(NET), url=f"https://nowhere.invalid/{name}")
    monkeypatch.setattr(pretrained, "find", lambda *_: found)
    whole.rename(hub / name)
    config = pretrained.settled(config_for(photos, NET, init="pretrained"))
    first, second = (assemble(config, SINGLE).model for _ in range(2))
    same_but_head(first, state)
    assert digest(first) == digest(second)
    other = assemble(replace(config, seed=1), SINGLE).model
    assert not torch.equal(other.state_dict()["fc.weight"], first.state_dict()["fc.weight"])
    (hub / name).write_bytes(b"another one")
    with pytest.raises(UserError, match=f"{name} is damaged: its sha256 is .* instead of {name[4:12]}"):
        assemble(config, SINGLE)


@pytest.mark.parametrize(("model", "file"), [
    (NET, "shufflenetv2_x0.5-f707e7126e.safetensors"),
    (TIMM_NET, f"{TIMM_NET}.safetensors"),
    (TIMM_NET, f"{TIMM_NET}.bin"),
])  # fmt: skip
def test_a_file_in_either_format_at_its_place(hub: Path, photos: Path, model: str, file: str) -> None:
    state = published(model)
    if file.endswith("safetensors"):
        save_file(state, hub / file)
    else:
        torch.save({"state_dict": state}, hub / file)
    same_but_head(assemble(pretrained.settled(config_for(photos, model, init="pretrained")), SINGLE).model, state)


def test_a_torn_file_and_one_of_another_network_are_refused(hub: Path, photos: Path) -> None:
    config = pretrained.settled(config_for(photos, TIMM_NET))
    place = hub / f"{TIMM_NET}.safetensors"
    place.write_bytes(b"torn")
    with pytest.raises(UserError, match="is damaged or not a safetensors file"):
        assemble(config, SINGLE)
    one_of_another_shape = published(TIMM_NET) | {"conv1.0.weight": torch.zeros(3, 3, 3, 3)}
    for another in ({"fc.weight": torch.zeros(2, 2)}, one_of_another_shape):
        save_file(another, place)
        with pytest.raises(UserError, match="does not fit timm's test_resnet"):
            assemble(config, SINGLE)
    net = replace(config, model=ModelConfig(model=NET, init="pretrained"))
    save_file(published(NET) | {"another": torch.zeros(1)}, hub / "shufflenetv2_x0.5-f707e7126e.safetensors")
    with pytest.raises(UserError, match=r"another \[1\] float -> \(none\)"):
        assemble(net, SINGLE)


def test_without_a_network_the_place_and_the_file_are_named(
    hub: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Mock(side_effect=OSError("the network is cut"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(socket.socket, "connect", closed)
    monkeypatch.setattr(socket, "getaddrinfo", closed)
    with pytest.raises(UserError) as caught:
        assemble(pretrained.settled(config_for(photos, NET, init="pretrained")), SINGLE)
    assert str(hub / "shufflenetv2_x0.5-f707e7126e.pth") in caught.value.message
    assert "download https://download.pytorch.org/models/shufflenetv2_x0.5-f707e7126e.pth and" in caught.value.remedy
    with pytest.raises(UserError) as caught:
        assemble(pretrained.settled(config_for(photos, TIMM_NET)), SINGLE)
    assert str(hub / f"{TIMM_NET}.safetensors") in caught.value.message
    assert f"model.safetensors of timm/{TIMM_NET}" in caught.value.remedy


def test_what_the_weights_were_made_with_is_taken_over() -> None:
    def data(*flags: str) -> DataConfig:
        return planned("train", lambda c: c, ["folder", *flags], "{}").data

    usual = data("--model", "efficientnet_b3")
    assert (usual.image_size, usual.mean, usual.crop_pct, usual.interpolation) == (224, (), 0, "auto")
    found = data("--model", "efficientnet_b3", "--init", "pretrained")
    assert (found.image_size, found.crop_pct, found.interpolation) == (300, 0.9375, "bicubic")
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    mine = data("--model", "efficientnet_b3", "--init", "pretrained", "--image-size", "128", "--mean", "0,0,0",
                "--std", "1,1,1", "--interpolation", "bilinear")  # fmt: skip
    assert (mine.image_size, mine.mean, mine.std, mine.interpolation) == (128, (0, 0, 0), (1, 1, 1), "bilinear")
    tagged = planned("train", lambda c: c, ["folder", "--model", TIMM_NET], "{}")
    assert tagged.model.init == "pretrained:r160_in1k"
    assert (tagged.data.image_size, tagged.data.mean) == (160, (0.5, 0.5, 0.5))
    assert round(160 / tagged.data.crop_pct) == 168  # as timm: floor(160 / 0.95)
    assert pretrained.settled(tagged) == tagged
    assert pretrained.settled(replace(tagged, model=replace(tagged.model, init="own.pt"))).model.init == "own.pt"


@pytest.mark.parametrize(
    ("model", "init", "message"),
    [
        ("resnet50", "pretrained:IMAGENET1K_V3", "unknown weights of resnet50 'IMAGENET1K_V3'\n  Did you mean"),
        ("test_vit.r161_in1k", "", "unknown weights of test_vit 'r161_in1k'\n  Did you mean r160_in1k"),
        ("resnet18.a1_in1k", "pretrained:a2_in1k", "two sets of weights"),
        ("digits_net", "pretrained", "nobody has published weights of digits_net"),
        ("package.module:factory", "pretrained", "nobody has published weights of package.module:factory"),
        ("resnot18", "pretrained", "unknown model 'resnot18'"),
    ],
)
def test_names_that_mean_no_weights(model: str, init: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pretrained.settled(Config(model=ModelConfig(model=model, init=init)))


@pytest.mark.parametrize("name", ["efficientnet_b3", "resnet50"])
def test_a_photo_is_prepared_as_the_weights_library_does(name: str) -> None:
    from torchvision.models import get_model_weights

    found: Weights = find(name)
    # without black and white: between its two passes the kernel for uint8 clips, as Pillow does
    image = torch.randint(64, 192, (3, 413, 521), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    theirs = get_model_weights(name).DEFAULT.transforms()(image)
    ours = centre_crop(image, found.size, round(found.crop_pct, 9), found.interpolation) / 255
    mean, std = (torch.tensor(each)[:, None, None] for each in (found.mean, found.std))
    # up to a level of 255, where it rounds otherwise
    torch.testing.assert_close((ours - mean) / std, theirs, rtol=0, atol=0.02)


def test_old_names_other_sizes_and_heads_that_only_train() -> None:
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.googlenet(num_classes=1000, init_weights=False, aux_logits=True, transform_input=True)
    found = find("googlenet")
    ours = models.build("googlenet", in_channels=3, num_classes=1000, image_size=224)
    ours.load_state_dict(converted(found, dict(theirs.state_dict()), 3, 224))
    pixels = torch.rand(2, 3, 224, 224)
    imagenet = [torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    with torch.no_grad():
        expected = theirs.eval()((pixels - imagenet[0]) / imagenet[1])
        given = ours.eval()((pixels - torch.tensor(found.mean)[:, None, None]) / torch.tensor(found.std)[:, None, None])
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)
    old = {"features.denseblock1.denselayer1.norm.1.weight": torch.zeros(1), "features.norm0.weight": torch.ones(1)}
    names = list(converted(find("densenet121"), old, 3, 224))
    assert names == ["features.denseblock1.denselayer1.norm1.weight", "features.norm0.weight"]
    vit = {"encoder.pos_embedding": torch.randn(1, 197, 8), "conv_proj.weight": torch.randn(8, 3, 16, 16)}
    assert converted(find("vit_b_16"), vit, 3, 160)["encoder.pos_embedding"].shape == (1, 101, 8)


def weights_sha256(folder: Path) -> str:
    end = end_of(folder)
    assert end["status"] == "completed"
    return str(end["weights_sha256"])


@pytest.mark.slow
def test_a_run_from_published_weights_knows_them_and_goes_on_without_their_file(
    hub: Path, photos: Path, tmp_path: Path
) -> None:
    save_file(published(NET), hub / "shufflenetv2_x0.5-f707e7126e.safetensors")
    config = config_for(photos, NET, init="pretrained", freeze_until="stage4")
    folder = tmp_path / "run"
    trained(SINGLE, config, str(folder))
    alone = weights_sha256(folder)
    run_ranks(trained, 2, config, str(tmp_path / "two"), env={"TORCH_HOME": str(hub.parent.parent)})
    assert weights_sha256(tmp_path / "two") == alone
    notes = "\n".join(read(folder / "journal.jsonl")[0]["notes"])
    for line in (
        "begun with torchvision shufflenet_v2_x0_5.IMAGENET1K_V1",
        "images: 64 pixels a side, mean 0.485 0.456 0.406",
        "frozen: 123 of 170 parameters (53,184 of 344,867 numbers), and 41 batch norm(s)",
        "layer decay 0.7 over 18 depths, by blocks: rates 0.0024 to 0.01",
    ):
        assert line in notes
    card = Card.read(folder / "weights" / "final.safetensors")
    assert (card.interpolation, card.mean) == ("bilinear", (0.485, 0.456, 0.406))
    assert card.classes == ("ants", "bees", "cats")
    assert card.initial_weights.startswith("torchvision shufflenet_v2_x0_5.IMAGENET1K_V1 (https://")
    assert card.initial_weights.endswith("licence: torchvision states none")
    shutil.rmtree(hub)
    shutil.rmtree(folder / "checkpoints" / sorted(p.name for p in (folder / "checkpoints").iterdir())[-1])
    trained(SINGLE, config, str(folder))
    assert weights_sha256(folder) == alone


def fetched(world: World, url: str) -> str:
    path = pretrained.file_of(replace(find(NET), url=url), world)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_one_process_downloads_and_a_wrong_checksum_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, served = b"weights" * 1000, tmp_path / "served"
    whole = hashlib.sha256(content).hexdigest()
    served.mkdir()
    for name in (f"net-{whole[:8]}.pth", "net-00000000.pth"):
        (served / name).write_bytes(content)
    env = {"TORCH_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    with server(served) as (address, asked):
        assert run_ranks(fetched, 2, f"{address}net-{whole[:8]}.pth", env=env) == [whole] * 2
        assert asked == [f"net-{whole[:8]}.pth"]
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert fetched(SINGLE, f"{address}net-{whole[:8]}.pth") == whole
        assert len(asked) == 1
        with pytest.raises(Exception, match=r"invalid hash value .expected .00000000"):
            fetched(SINGLE, f"{address}net-00000000.pth")
    assert [p.name for p in (tmp_path / "hub/checkpoints").iterdir()] == [f"net-{whole[:8]}.pth"]
