"""Parameter groups: rates that fall with depth as timm's do, the head's own, and what weight decay leaves alone."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import Config, ModelConfig, OptimConfig
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import assemble
from lockstep.training.optimizers import build, depths, groups, head, lines, spared
from tests.ranks import run_ranks
from tests.training import test_freezing
from tests.training.test_resume import end_of, run_jobs

SINGLE = World.single()
LAYERS: dict[str, Any] = {"layer_decay": 0.5, "head_lr": 0.05}


def by_name(model: nn.Module, made: list[dict[str, Any]], *what: str) -> dict[str, tuple[float, ...]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: tuple(group[key] for key in what) for group in made for p in group["params"]}


@pytest.mark.parametrize(
    "name", ["test_vit", "test_resnet", "test_convnext", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"]
)
def test_the_rates_and_decays_are_timms(name: str) -> None:
    timm = pytest.importorskip("timm")
    param_groups_layer_decay = pytest.importorskip("timm.optim").param_groups_layer_decay
    with torch.device("meta"):
        model: nn.Module = timm.create_model(name, num_classes=5)
    no_decay = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(model, 0.05, no_decay, layer_decay=0.75)
    expected = by_name(model, theirs, "lr_scale", "weight_decay")
    ours = groups(model, OptimConfig(optimizer="adamw", weight_decay=0.05, layer_decay=0.75), 1.0)
    assert by_name(model, ours, "lr", "weight_decay") == expected
    assert len({scale for scale, _ in expected.values()}) > 3
    assert ours[0]["lr"] == 1.0  # the rate that is logged


def test_the_depths_of_torchvisions_models() -> None:
    import torchvision

    with torch.device("meta"):
        found, how = depths(torchvision.models.resnet50(num_classes=7))
        assert how == "blocks"
        assert (found["conv1.weight"], found["bn1.bias"], found["layer1.0.conv1.weight"]) == (0, 0, 1)
        assert (found["layer2.0.downsample.0.weight"], found["layer4.2.conv3.weight"], found["fc.bias"]) == (4, 16, 17)
        found, _ = depths(torchvision.models.vit_b_16(num_classes=7))
        assert (found["class_token"], found["conv_proj.weight"]) == (0, 0)
        assert (found["encoder.pos_embedding"], found["encoder.layers.encoder_layer_11.mlp.0.weight"]) == (0, 12)
        assert (found["encoder.ln.weight"], found["heads.head.weight"]) == (12, 13)
        found, how = depths(torchvision.models.vgg11_bn(num_classes=7))
        assert how == "layers"
        assert (found["features.0.weight"], found["features.1.weight"], found["features.4.weight"]) == (0, 0, 1)
        assert found["classifier.6.weight"] == 10
        others = ("densenet121", "swin_t", "convnext_tiny", "efficientnet_b0", "squeezenet1_1")
        for name in ("mobilenet_v3_small", *others):
            model = torchvision.models.get_model(name, num_classes=7)
            found, _ = depths(model)
            assert set(found) == {each for each, _ in model.named_parameters()}
            assert sorted(set(found.values())) == list(range(max(found.values()) + 1))
            assert {each for each in found if found[each] == max(found.values())} == head(model), name


def test_head_and_decay() -> None:
    model = test_freezing.net(1, 10, 8)
    assert head(model) == {"head.weight", "head.bias"}
    optim = OptimConfig(optimizer="adamw", lr=0.01, weight_decay=0.1, **LAYERS)
    made = by_name(model, groups(model, optim, 0.01), "lr", "weight_decay")
    assert made["head.weight"] == (0.05, 0.1)
    assert made["head.bias"] == (0.05, 0.0)
    rates = {block: made[f"{block}.0.weight"] for block in ("top", "middle", "stem")}
    assert rates == {"top": (0.005, 0.1), "middle": (0.0025, 0.1), "stem": (0.00125, 0.1)}
    assert made["stem.1.bias"][1] == 0
    for name, choice, count in (("adamw", "auto", 7), ("adamw", "yes", 0), ("sgd", "auto", 0), ("sgd", "no", 7)):
        chosen = OptimConfig(optimizer=name, weight_decay=0.1, decay_norms=choice)  # type: ignore[arg-type]
        assert len(spared(model, chosen)) == count
        rest = [g for g in build(model, chosen, 0.1).param_groups if not g["weight_decay"]]
        assert len([p for g in rest for p in g["params"]]) == count
    said = "\n".join(lines(model, optim, 0.01))
    assert "layer decay 0.5 over 4 depths, by layers: rates 0.00125 to 0.01" in said
    assert "the head (head.bias, head.weight) has the rate 0.05" in said
    assert "weight decay 0.1 leaves 7 of 11 parameters alone" in said


@pytest.mark.parametrize("flags", [{"layer_decay": 0.7}, {"head_lr": 0.1}, {"decay_norms": "no"}])
def test_who_makes_groups_is_left_alone(flags: dict[str, Any]) -> None:
    for name in ("muon-sgd", "package.module:factory"):
        with pytest.raises(UserError, match="it makes its own groups"):
            OptimConfig(optimizer=name, **flags)
    with pytest.raises(UserError, match=r"--layer-decay 1.5 is too large"):
        OptimConfig(layer_decay=1.5)
    with pytest.raises(UserError, match="--head-lr -1"):
        OptimConfig(head_lr=-1)


def with_groups(optimizer: str, **changed: Any) -> Config:
    base = test_freezing.EXACT
    optim = dataclasses.replace(base.optim, optimizer=optimizer, **LAYERS)
    return dataclasses.replace(base, optim=optim, **changed)


def test_scheduled_rates_keep_their_ratio() -> None:
    run = assemble(with_groups("sgd"), SINGLE)
    for batch in run.train.epoch(0):
        run.step(batch)
    rates = {round(group["lr"] / group["initial_lr"], 12) for group in run.step.optimizer.param_groups}
    assert len(rates) == 1
    assert rates != {1.0}
    assert len(run.step.optimizer.param_groups) == 3


@pytest.mark.slow
def test_groups_come_back_from_a_checkpoint_on_other_numbers_of_processes(tmp_path: Path) -> None:
    cases = [(with_groups("adamw"), 1, 8, 3), (with_groups("timm:muon"), 3, 7, 1)]
    jobs: dict[int, list[tuple[Any, ...]]] = {1: [], 2: [], 3: []}
    for i, (config, before, at, _) in enumerate(cases):
        jobs[2].append((config, str(tmp_path / f"whole-{i}")))
        jobs[before].append((config, str(tmp_path / f"{i}"), at))
    run_jobs(jobs)
    after: dict[int, list[tuple[Any, ...]]] = {}
    for i, (config, _, _, then) in enumerate(cases):
        after.setdefault(then, []).append((config, str(tmp_path / f"{i}")))
    run_jobs(after)
    for i in range(len(cases)):
        whole, end = end_of(tmp_path / f"whole-{i}"), end_of(tmp_path / f"{i}")
        assert (whole["weights_sha256"], whole["loss"]) == (end["weights_sha256"], end["loss"])


def sharded_groups(world: World) -> list[tuple[float, float, int]]:
    config = with_groups("adamw", model=ModelConfig(model="tests.training.test_freezing:net"))
    run = assemble(dataclasses.replace(config, exact=0).with_execution(strategy="fsdp"), world)
    return [(g["lr"], g["weight_decay"], len(g["params"])) for g in run.step.optimizer.param_groups]


@pytest.mark.slow
def test_sharded_weights_have_the_same_groups() -> None:
    assert run_ranks(sharded_groups, 2) == [sharded_groups(SINGLE)] * 2
