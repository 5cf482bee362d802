"""A loop of one's own over Datasets of one's own: what they draw depends on seed, epoch and sample alone."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms import v2

import lockstep as ls
from lockstep.checkpoint.weights import digest
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.exact import ExactSync
from tests.ranks import alone, run_ranks

ALONE = World.single()
TRAIN, VAL, BATCH, EPOCHS = 23, 7, 10, 2


class Drawing(Dataset[tuple[Tensor, int]]):
    """Images whose pixels are the sample's number and what three generators say."""

    def __init__(self, count: int) -> None:
        self.targets = [index % 3 for index in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = float(torch.rand(())), random.random(), np.random.rand()
        return torch.tensor([float(index), *drawn]).reshape(1, 2, 2), self.targets[index]


def pictures() -> tuple[Any, Any]:
    """torchvision's own way: a data set with its transform, PIL images inside."""
    augment = v2.Compose([v2.RandomCrop(8, padding=2), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    augment.transforms.insert(0, v2.RandomHorizontalFlip())
    whole = FakeData(TRAIN, (3, 8, 8), 3, transform=augment)
    whole.classes = ["a", "b", "c"]
    return whole, Subset(whole, range(VAL))


def images(world: World, workers: int, start: int = 0, sets: Any = None, **given: Any) -> dict[Any, bytes]:
    """This rank's images as bytes, by (epoch, step, place in the global batch, id), and by ("val", chunk)."""
    made = sets or (Drawing(TRAIN), Drawing(VAL))
    train, val = ls.loaders(made, world, batch_size=BATCH, seed=4, workers=workers, **given)
    found: dict[Any, bytes] = {}
    for epoch in range(EPOCHS):
        for batch in train.epoch(epoch, start):
            places = np.concatenate([np.arange(0), *(np.arange(batch.count)[p.rows] for p in batch.shards)]).tolist()
            for place, image in zip(places, batch.images, strict=True):
                found[epoch, batch.step, place, int(batch.all_ids[place])] = image.numpy().tobytes()
    return found | {("val", chunk): each.numpy().tobytes() for chunk, each, _ in val}


def trained(world: World) -> str:
    """The digest of a network's weights, trained over torchvision's transforms in exact mode."""
    train, _ = ls.loaders(pictures(), world, batch_size=BATCH, seed=4, exact=4, workers=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = ls.TrainStep(net, F.cross_entropy, optimizer, seed=4, sync=ExactSync(net, world, 4))
    for epoch in train.epochs(EPOCHS):
        for batch in epoch:
            step(batch)
    return digest(net)


def everything(world: World) -> dict[str, Any]:
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)
    random.seed(world.rank)
    return {
        "here": images(world, 0),
        "worker": images(world, 1),
        "resumed": images(world, 0, start=2),
        "repeated": images(world, 0, aug_repeats=2),
        "pictures": images(world, 0, sets=pictures()),
        "weights": trained(world),
    }


def test_a_dataset_draws_the_same_on_any_number_of_processes_and_workers() -> None:
    one = alone(everything)
    ranks = run_ranks(everything, 3, timeout=240)
    assert {rank["weights"] for rank in ranks} == {one["weights"]}
    for what in ranks[0].keys() - {"weights"}:
        together: dict[Any, bytes] = {}
        for rank in ranks:
            assert not together.keys() & rank[what].keys()
            together |= rank[what]
        assert together == one[what], what
    assert one["worker"] == one["here"]
    assert all(one["here"][key] == image for key, image in one["resumed"].items())
    assert len(one["resumed"]) < len(one["here"])


def test_epochs_samples_and_repeats_draw_anew_and_evaluation_alike() -> None:
    drawn = {key: np.frombuffer(image, np.float32) for key, image in images(ALONE, 0).items() if key[0] != "val"}
    assert len(drawn) == TRAIN * EPOCHS
    for place in 1, 2, 3:  # torch's, Python's, NumPy's
        assert len({float(image[place]) for image in drawn.values()}) == TRAIN * EPOCHS
    assert all(image[0] == key[3] for key, image in drawn.items())
    twice = images(ALONE, 0, aug_repeats=2)
    first, again = (
        {key[3] % TRAIN: image for key, image in twice.items() if key[0] == 0 and key[3] // TRAIN == time}
        for time in (0, 1)
    )
    both = first.keys() & again.keys()
    assert both
    assert all(first[i] != again[i] for i in both)
    _, val = ls.loaders((Drawing(TRAIN), Drawing(VAL)), ALONE, batch_size=BATCH, workers=0)
    assert [each.tolist() for _, each, _ in val] == [each.tolist() for _, each, _ in val]


def test_a_users_own_generators_go_on_as_they_were() -> None:
    train, _ = ls.loaders((Drawing(TRAIN), Drawing(VAL)), ALONE, batch_size=BATCH)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    train.images.read(np.arange(5), 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


class Endless(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ((Endless(), Endless()), r"ls\.loaders/train is an IterableDataset \(Endless\)"),
        ((Drawing(3), Endless()), r"ls\.loaders/val is an IterableDataset \(Endless\)"),
        (Drawing(3), "ls.loaders gives a Drawing, not two sets"),
        ((Drawing(3), Drawing(2)), "train has 3 classes and val has 2"),
        ((FakeData(3), FakeData(3)), "train: a FakeData does not say which classes there are"),
    ],
    ids=["iterable", "second iterable", "one", "classes", "unsaid"],
)
def test_what_is_no_pair_of_datasets_is_said(sets: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ls.loaders(sets, ALONE, batch_size=2)


class Labelled(Dataset[tuple[Tensor, int]]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.dataset[index][0], int(self.dataset.labels[index])


def test_labels_are_found_where_datasets_keep_them() -> None:
    plain = TensorDataset(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 1, 0]))
    named = TensorDataset(torch.zeros(4, 1, 2, 2))
    named.labels = np.array([0, 1, 1, 0])  # type: ignore[attr-defined]  # as SVHN keeps them
    pairs = TensorDataset(torch.zeros(4, 1, 2, 2), torch.zeros(4), torch.zeros(4))
    pairs.labels = []  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="sample 0 is a tuple of 3"):
        ls.loaders((pairs, pairs), ALONE, batch_size=2)
    for made in plain, Subset(plain, [0, 1]), Labelled(named):
        train, _ = ls.loaders((made, made), ALONE, batch_size=2)
        assert train.images.classes == ("0", "1")


def test_a_pair_of_tensors_is_taken_as_well() -> None:
    pixels, labels = torch.randint(0, 256, (12, 1, 4, 4), dtype=torch.uint8), torch.arange(12) % 4
    train, val = ls.loaders(((pixels, labels), (pixels[:4], labels[:4])), ALONE, batch_size=6, flip=True)
    assert [len(batch.labels) for batch in train.epoch(0)] == [6, 6]
    assert sum(len(each) for _, each, _ in val) == 4


def test_a_data_loaders_own_arguments_are_refused_with_what_to_give_instead() -> None:
    both: Any = (Drawing(TRAIN), Drawing(VAL))
    for given_, sentence in (
        ({"sampler": [1, 2]}, r"ls\.loaders takes no sampler\n.*on any number of processes.*Subset"),
        ({"shuffle": True}, r"ls\.loaders takes no shuffle\n.*a function of seed and epoch"),
        ({"num_workers": 4}, r"ls\.loaders takes no num_workers\n.*workers=2"),
        ({"generator": 1}, r"ls\.loaders takes no generator\n.*seed=0"),
        ({"worker_init_fn": print}, r"ls\.loaders takes no worker_init_fn\n.*Leave it out"),
        ({"flipped": True}, r"unknown argument of ls\.loaders 'flipped'\n.*help\(lockstep\.loaders\)"),
        ({"flipp": True}, r"unknown argument of ls\.loaders 'flipp'\n.*Did you mean flip"),
    ):
        with pytest.raises(UserError, match=sentence):
            ls.loaders(both, ALONE, batch_size=BATCH, **given_)
