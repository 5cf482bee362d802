"""Synchronised batch normalisation against nn.BatchNorm on the whole batch, in float64; and the care of buffers."""

import copy
import pickle
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import SyncBatchNorm, _global_statistics, apart, convert_sync_batchnorm, ghost
from lockstep.parallel.module_state import preserved_buffers
from tests.ranks import run_ranks

SINGLE = World.single()
SPLITS = {1: ([7],), 2: ([4, 3], [7, 0], [1, 6]), 3: ([3, 3, 1], [4, 0, 3], [5, 1, 1])}


def _network(momentum: float | None = 0.1) -> nn.Module:
    """Two batch normalisations with convolutions around, float64; parameters far from their usual start."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, affine=False, momentum=momentum),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5, momentum=momentum),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(7, 2, 6, 6, dtype=torch.float64) * 3 + 5, torch.randn(7, 5, dtype=torch.float64)


def _train(model: nn.Module, x: Tensor, target: Tensor, steps: int, total: int) -> tuple[Tensor, Tensor]:
    """`steps` forwards and one backward of this share's part of the loss; the outputs and the input's gradient."""
    x = x.clone().requires_grad_()
    for _ in range(steps):
        y = model(x)
    (((y - target) ** 2).sum() / total).backward()
    assert x.grad is not None
    return y.detach(), x.grad


def _sync_rank(world: World, split: list[int], momentum: float | None, use_ghost: bool = True) -> dict[str, object]:
    model = convert_sync_batchnorm(_network(momentum), world)
    x, target = _batch()
    start = sum(split[: world.rank])
    share = slice(start, start + split[world.rank])
    if split[world.rank]:
        y, d_x = _train(model, x[share], target[share], 2, len(x))
    else:  # a dummy with a wild loss: nothing of it may reach anyone
        with ghost(model, use_ghost):
            _train(model, x[:2] * 100, target[:2] * 100, 2, len(x))
        y, d_x = x.new_empty(0, 5), torch.empty_like(x[:0])
    norms = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
    grads = [p.grad.numpy() for m in norms for p in m.parameters()]
    grads.append(model[0].weight.grad.numpy())  # upstream of every norm: only synchronised statistics make it right
    buffers = {name: b.numpy() for name, b in model.named_buffers()}
    return {"y": y.numpy(), "d_x": d_x.numpy(), "grads": grads, "buffers": buffers, "state": list(model.state_dict())}


def _all_splits(world: World) -> list[dict[str, object]]:
    return [_sync_rank(world, split, m) for split in SPLITS[world.size] for m in (0.1, None)]


def _everything(world: World) -> tuple[list[dict[str, object]], dict[str, object]]:
    return _all_splits(world), _edge_cases(world) if world.size == 2 else {}


@cache
def _ranks(n: int) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    return run_ranks(_everything, n, timeout=180)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_it_is_batch_norm_of_the_global_batch_on_any_number_of_ranks_and_uneven_shares(n: int) -> None:
    ranks: list[list[Any]] = [_all_splits(SINGLE)] if n == 1 else [splits for splits, _ in _ranks(n)]
    cases = [(split, m) for split in SPLITS[n] for m in (0.1, None)]
    for index, (split, momentum) in enumerate(cases):
        reference = _network(momentum)
        y, d_x = _train(reference, *_batch(), 2, 7)
        mine = [rank[index] for rank in ranks]
        torch.testing.assert_close(torch.cat([torch.tensor(r["y"]) for r in mine]), y, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.cat([torch.tensor(r["d_x"]) for r in mine]), d_x, rtol=0, atol=1e-10)
        norms = [m for m in reference.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        expected = [p.grad for m in norms for p in m.parameters()] + [reference[0].weight.grad]
        for position, grad in enumerate(expected):
            summed = torch.stack([torch.tensor(r["grads"][position]) for r in mine]).sum(0)
            torch.testing.assert_close(summed, grad, rtol=0, atol=1e-10)
        for rank in mine:
            assert rank["state"] == list(reference.state_dict()), split
            for name, buffer in reference.named_buffers():
                torch.testing.assert_close(torch.tensor(rank["buffers"][name]), buffer, rtol=0, atol=1e-10)


def _without_ghost(world: World) -> float:
    broken = _sync_rank(world, [7, 0], 0.1, use_ghost=False)
    reference = _network()
    y, _ = _train(reference, *_batch(), 2, 7)
    return float((torch.tensor(broken["y"]) - y).abs().max()) if world.rank == 0 else 0.0


def _statistics_of_large_offsets(world: World) -> list[float]:
    x = torch.tensor([[1e4 + world.rank], [1e4 - world.rank], [1e4]], dtype=torch.float32)
    mean, squares, count, _ = _global_statistics(x, world, False)
    return [mean.item() - 1e4, squares.item(), count.item()]


def _finite_gradients(model: nn.Module) -> bool:
    return all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def _edge_cases(world: World) -> dict[str, object]:
    # bf16 autocast: bf16 activations, float32 statistics; the compiled model; a batch of one value per rank
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    model = convert_sync_batchnorm(layers, world)
    images = torch.randn(2 * world.size, 3, 6, 6)[2 * world.rank : 2 * world.rank + 2]
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images.to(memory_format=torch.channels_last))
        y.float().square().mean().backward()
    compiled: Any = torch.compile(copy.deepcopy(model).eval().train(), backend="aot_eager")
    compiled(images).sum().backward()
    single = convert_sync_batchnorm(nn.BatchNorm1d(2), world)
    one = single(torch.tensor([[float(world.rank), 2.0 * world.rank]]))
    return {
        "without ghost": _without_ghost(world),
        "offsets": _statistics_of_large_offsets(world),
        "dtypes": [str(y.dtype), str(model[1].running_var.dtype), str(model[1].weight.grad.dtype)],
        "finite": bool(torch.isfinite(y).all()) and _finite_gradients(model),
        "running": model[1].running_mean.tolist(),
        "compiled": int(compiled._orig_mod[1].num_batches_tracked),
        "one": one.tolist(),
        "alike": [single(torch.eye(2)).requires_grad, single.running_var.tolist()],
    }


def test_two_ranks_at_the_edges() -> None:
    first, second = (edges for _, edges in _ranks(2))
    assert first["without ghost"] > 1e-3, "a dummy that is not a ghost must be seen, or the test above proves nothing"
    assert first["offsets"] == second["offsets"]
    # sum of squares minus square of sum gives junk here
    assert first["offsets"] == pytest.approx([0.0, 2.0, 6.0], abs=1e-3)
    assert first["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert first["finite"]
    assert second["finite"]
    assert first["running"] == second["running"]
    assert first["alike"] == second["alike"] == [True, pytest.approx([0.905, 1.04])], "rows that all pass count once"
    assert first["compiled"] == 2
    assert [first["one"], second["one"]] == [[[pytest.approx(-1, abs=1e-3)] * 2], [[pytest.approx(1, abs=1e-3)] * 2]]


@pytest.mark.parametrize(("affine", "shape"), [(True, (4, 3)), (False, (3, 2, 2)), (True, (2, 3, 2, 2))])
def test_gradcheck(affine: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer = convert_sync_batchnorm(nn.BatchNorm1d(shape[1], affine=affine).double(), SINGLE)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = tuple(layer.parameters())

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip([name for name, _ in layer.named_parameters()], parameters, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    assert torch.autograd.gradcheck(function, (x, *(w.detach().requires_grad_() for w in weights)))


def test_conversion_keeps_everything_of_a_layer() -> None:
    shared = nn.BatchNorm2d(3, eps=0.5, momentum=None)
    model = nn.Sequential(shared, nn.BatchNorm1d(4, affine=False, track_running_stats=False), shared).double().eval()
    parameters, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    converted = convert_sync_batchnorm(model, SINGLE)
    assert converted is model
    assert all(isinstance(layer, SyncBatchNorm) and not layer.training for layer in model)
    first, second, third = cast(list[SyncBatchNorm], list(model))
    assert first is third
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(first))), nn.BatchNorm2d), "as who freezes them asks"
    assert (first.eps, first.momentum, first.affine) == (0.5, None, True)
    assert (second.affine, second.track_running_stats, second.running_mean) == (False, False, None)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v.dtype for k, v in state.items()}
    assert isinstance(convert_sync_batchnorm(nn.BatchNorm1d(2), SINGLE), SyncBatchNorm)
    assert convert_sync_batchnorm(model, SINGLE)[0] is model[0], "twice is once"


def test_evaluation_is_plain_batch_norm_without_a_collective() -> None:
    plain = nn.BatchNorm1d(3)
    plain(torch.randn(8, 3) + 2)
    two = World(0, 2, 0, 2, torch.device("cpu"), "gloo")  # no process group: a collective would raise
    layer = convert_sync_batchnorm(copy.deepcopy(plain), two).eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x), plain.eval()(x), rtol=0, atol=0)


def test_a_subclass_of_unknown_meaning_is_refused_and_timms_keeps_its_activation() -> None:
    class Odd(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(UserError, match="Odd"):
        convert_sync_batchnorm(nn.Sequential(Odd(3)), SINGLE)
    layers = pytest.importorskip("timm.layers")
    layer = layers.BatchNormAct2d(3)
    x = torch.randn(4, 3, 5, 5)
    converted = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)), SINGLE)
    torch.testing.assert_close(converted(x), layer(x))
    assert list(converted[0].state_dict()) == list(layer.state_dict())


def test_what_forward_writes_is_refused_by_torchs_words_and_a_layer_may_pass_twice() -> None:
    for layer in (nn.BatchNorm1d(3), convert_sync_batchnorm(nn.BatchNorm1d(3), SINGLE)):
        layer(layer(torch.randn(4, 3))).square().sum().backward()
        y = layer(torch.randn(4, 3))
        cast(Tensor, layer.running_var).clamp_(min=0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.square().sum().backward()


def test_bad_inputs_are_named() -> None:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(3), SINGLE)
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(torch.randn(1, 3))
    with pytest.raises(ValueError, match=r"\[batch, 3, \.\.\.\]"):
        layer(torch.randn(4, 2))


def test_ghost_and_preserved_buffers_last_as_long_as_their_context() -> None:
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), SINGLE)
    with pytest.raises(ValueError, match="more than 1 value"), ghost(model):
        model(torch.randn(1, 2))  # a ghost alone in its world has nothing to be normalised by
    layers = cast(list[SyncBatchNorm], list(model.children()))
    assert not any(layer.ghost for layer in layers)
    with ghost(model):
        assert all(layer.ghost for layer in layers)
    assert not any(layer.ghost for layer in layers)
    plain = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    before = copy.deepcopy(plain.state_dict())
    with preserved_buffers(apart(plain)):
        plain(torch.randn(4, 2))
        assert int(plain.state_dict()["0.num_batches_tracked"]) == 1
    with preserved_buffers(apart(model)):
        model(torch.randn(4, 2))
    assert int(model[0].num_batches_tracked) == 1, "a synchronised layer's update is the other ranks' too"
    assert all(torch.equal(a, b) for a, b in zip(before.values(), plain.state_dict().values(), strict=True))
