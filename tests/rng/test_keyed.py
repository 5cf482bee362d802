"""A sample's draws are its own: the same alone or in a batch, on any rank, in any shard, computed again or not."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from lockstep.rng import intercept
from lockstep.rng.draws import Draws
from lockstep.rng.intercept import keyed, left_replaced
from tests.rng.networks import CLASSES, NETWORKS, Checkpointed, Plain

N = 7
CUTS = {
    "interleaved": [[0, 2, 4, 6], [1, 3, 5]],
    "uneven": [[6, 1], [0], [5, 2, 3, 4]],
    "alone": [[i] for i in range(N)],
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network in float64 and N images for it."""
    torch.manual_seed(0)
    make, (channels, side) = NETWORKS[name]
    return make().double(), torch.randn(N, channels, side, side, dtype=torch.float64)


def passes(
    model: nn.Module, images: Tensor, cut: Sequence[Sequence[int]], seed: int = 0, step: int = 3
) -> tuple[Tensor, Tensor]:
    """Outputs [N, classes] and the gradient of the mean loss [parameters], in the shards of a cut."""
    draws, outputs = Draws(seed), torch.zeros(N, CLASSES, dtype=images.dtype)
    model.zero_grad()
    for shard in cut:
        rows = torch.tensor(shard)
        with keyed(draws, model, step, rows.numpy() + 100, images[rows]):
            outputs[rows] = (found := model(images[rows])).detach().to(outputs)
            (F.cross_entropy(found, rows % CLASSES, reduction="sum") / N).backward()
    return outputs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


WHOLE = [list(range(N))]


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_are_the_same_for_any_cut(name: str) -> None:
    model, images = network(name)
    outputs, gradient = passes(model, images, WHOLE)
    for cut in CUTS.values():
        found, its_gradient = passes(model, images, cut)
        assert (found - outputs).abs().max() < 1e-10
        assert (its_gradient - gradient).abs().max() < 1e-10
    assert (passes(model, images, WHOLE, step=4)[0] - outputs).abs().max() > 1e-3, "another step, other draws"
    assert (passes(model, images, WHOLE, seed=1)[0] - outputs).abs().max() > 1e-3, "another seed, other draws"


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_draws_the_same(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, plain = Checkpointed(reentrant).double(), Plain(False).double()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(N, 3, 6, 6, dtype=torch.float64)
    again, once = passes(model, images, WHOLE), passes(plain, images, WHOLE)
    assert torch.equal(again[0], once[0])
    assert torch.equal(again[1], once[1])


def test_masks_are_the_same_in_any_dtype() -> None:
    kept = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = nn.Dropout(0.3)
        images = torch.ones(4, 50, dtype=dtype)
        with keyed(Draws(0), model, 0, np.arange(4), images):
            kept.append(model(images) != 0)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_autocast_draws_the_same_masks() -> None:
    model, images = network("vit")
    masks: list[list[Tensor]] = []
    model.float()
    for enabled in (False, True):
        masks.append([])
        hook = model.get_submodule("encoder.dropout").register_forward_hook(
            lambda _, args, out: masks[-1].append((out != 0) | (args[0] == 0))
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            passes(model, images.float(), WHOLE)
        hook.remove()
    assert torch.equal(masks[0][-1], masks[1][-1])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, where it is left
def test_a_compiled_model_draws_the_same_masks() -> None:
    """Without its kernels, which are inductor's: what matters is that the compiler doesn't take dropout for its own."""
    layers = nn.Linear(4, 40), nn.Dropout(0.5), StochasticDepth(0.5, "row"), nn.Linear(40, CLASSES)
    model = nn.Sequential(*layers).double()
    images, ids, outputs = torch.randn(N, 4, dtype=torch.float64), np.arange(N), []
    for compiled in (False, True):
        if compiled:
            model.compile(backend="aot_eager")
        draws = Draws(0, compiled)
        for shard in (slice(0, N), slice(0, 3), slice(3, N)):
            with keyed(draws, model, 2, ids[shard], images[shard]):
                outputs.append(model(images[shard]).detach())
    whole = outputs[0]
    for found in (torch.cat(outputs[1:3]), outputs[3], torch.cat(outputs[4:])):
        assert (found - whole).abs().max() < 1e-10


def test_threads_have_keys_of_their_own() -> None:
    """Pieces that go through copies of a model at the same time."""
    (model, images), *others = (network("everything") for _ in range(3))
    expected, _ = passes(model, images, WHOLE)
    draws, outputs = Draws(0), torch.zeros_like(expected)
    together = threading.Barrier(2)

    def take(copy: nn.Module, rows: Tensor) -> None:
        with keyed(draws, copy, 3, rows.numpy() + 100, images[rows]):
            together.wait(60)
            outputs[rows] = copy(images[rows]).detach()

    pairs = zip(others, CUTS["interleaved"], strict=True)
    threads = [threading.Thread(target=take, args=(copy, torch.tensor(shard))) for (copy, _), shard in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (outputs - expected).abs().max() < 1e-10


def test_torch_is_as_it_was_afterwards() -> None:
    before = {(place, name): place.__dict__.get(name) for place, names in intercept.PLACES for name in names}
    model, images = network("everything")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    passes(model, images, WHOLE)
    assert torch.equal(torch.rand(3), expected), "no draw of ours comes from torch's generator"
    torch.manual_seed(5)
    assert torch.equal(torch.empty(3).uniform_(), expected), "a tensor's methods stay replaced, and are torch's"
    assert {(place, name): place.__dict__.get(name) for place, name in before} == before
    assert (F.dropout(torch.ones(1000)) == 0).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_between_steps_an_epoch_draws_from_torchs_own_generator(compiled: bool) -> None:
    model, images = network("everything")
    before = F.dropout, passes(model, images, WHOLE)
    torch.manual_seed(1)
    drawn = torch.rand(3), F.dropout(images)
    with left_replaced(Draws(0, compiled)):
        again = passes(model, images, WHOLE)
        assert (F.dropout is before[0]) == compiled, "a compiler must find torch's"
        torch.manual_seed(1)
        assert all(map(torch.equal, drawn, (torch.rand(3), F.dropout(images))))
    assert F.dropout is before[0]
    assert all(map(torch.equal, again, before[1]))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_somebody_else_has_put_there_since_comes_back(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    draws, first = Draws(0, compiled), F.dropout
    for theirs in (first, lambda x: x, lambda x: 2 * x):
        monkeypatch.setattr(F, "dropout", theirs)
        with keyed(draws, nn.Flatten(), 0, np.arange(2), torch.zeros(2, 1)):
            assert F.dropout is not theirs
        assert F.dropout is theirs


def test_a_model_that_draws_nothing_has_no_plan() -> None:
    calls = []
    model = nn.Linear(4, CLASSES).double()
    model.register_forward_hook(lambda *_: calls.append(1))
    draws, images = Draws(0), torch.zeros(2, 4, dtype=torch.float64)
    with keyed(draws, model, 0, np.arange(2), images):
        model(images)
    assert draws.plan is None
    assert len(calls) == 1


taken = 0  # passes of Stateful


class Stateful(nn.Module):
    """Changes all that a forward pass can change, and then draws."""

    largest = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.count, self.seen = nn.BatchNorm1d(4), 0, list[int]()
        self.register_buffer("moved", torch.zeros(4))
        self.replaced: Tensor
        self.register_buffer("replaced", torch.zeros(4))
        self.slow = nn.Parameter(torch.zeros(4), requires_grad=False)  # as of a momentum encoder

    def forward(self, x: Tensor) -> Tensor:
        global taken
        taken += 1
        Stateful.largest = max(Stateful.largest, float(len(x) + taken))
        self.count += 1
        self.seen.append(len(x))
        self.moved += x.mean(0).detach()
        self.slow.data += x.mean(0).detach()
        self.replaced = self.replaced * 0.5 + x.mean(0).detach()
        return F.dropout(self.norm(x)) * np.random.rand()


def test_a_hook_that_removes_itself_is_still_there_for_the_first_pass() -> None:
    model, calls = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)), list[int]()

    def once(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        calls.append(len(output))
        handle.remove()

    handle = model[1].register_forward_hook(once)
    draws, images = Draws(0), torch.ones(2, 4)
    for step in range(2):  # the first one finds where the batch is, by passes of 3 and of 5
        with keyed(draws, model, step, np.arange(2), images):
            model(images)
    assert [n for n in calls if n == len(images)] == [2]


def test_finding_the_batch_leaves_no_trace() -> None:
    global taken
    state = []
    images = torch.arange(12.0).view(3, 4)
    for planned in (False, True):
        model, draws = Stateful(), Draws(0)
        taken, Stateful.largest = 0, 0.0
        np.random.seed(0)
        torch.manual_seed(0)
        if planned:
            with keyed(draws, model, 0, np.arange(3), images):
                model(images).sum().backward()
            assert draws.plan is not None
        else:
            model(images).sum().backward()
        state.append(
            (
                Stateful.largest,
                model.count,
                model.seen,
                [b.tolist() for b in (model.slow, *model.buffers())],
                np.random.rand(),
            )
        )
    assert state[0] == state[1]
