"""What the course's pages say of torch is true of the one that is installed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data.distributed import DistributedSampler

import digits
from lockstep.distributed.world import World
from tests.ranks import run_ranks


def test_data_parallel_on_a_cpu_calls_the_module() -> None:
    module = nn.Linear(2, 2)
    wrapped = nn.DataParallel(module)
    if not torch.cuda.is_available():
        assert wrapped.device_ids == []
    assert all(name.startswith("module.") for name in wrapped.state_dict())


def test_what_the_sampler_repeats_and_leaves_out() -> None:
    train, _ = digits.load()
    assert len(train) == 1437
    for drop, expected in (False, [0, 1, 3]), (True, [0, 1, 1]):
        seen = [sum(len(DistributedSampler(train, n, rank, drop_last=drop)) for rank in range(n)) for n in (1, 2, 4)]
        assert [abs(total - 1437) for total in seen] == expected


def test_the_sampler_seeds_with_seed_plus_epoch() -> None:
    train, _ = digits.load()
    orders: list[list[int]] = []
    for seed, epoch in (0, 1), (1, 0):
        sampler: DistributedSampler[int] = DistributedSampler(train, 2, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[1]


def test_the_mean_of_nothing_is_nan_and_its_sum_is_not() -> None:
    outputs, labels = torch.randn(0, 10, requires_grad=True), torch.zeros(0, dtype=torch.long)
    assert F.cross_entropy(outputs, labels).isnan()
    assert F.cross_entropy(outputs, labels, reduction="sum") == 0


def test_class_weights_divide_by_the_weights_of_the_labels() -> None:
    outputs, labels, weight = torch.randn(4, 2), torch.tensor([0, 1, 1, 1]), torch.tensor([3.0, 1.0])
    total = F.cross_entropy(outputs, labels, weight=weight, reduction="sum")
    torch.testing.assert_close(F.cross_entropy(outputs, labels, weight=weight), total / weight[labels].sum())


def test_what_the_scaler_begins_with_and_the_smallest_float16() -> None:
    assert torch.amp.GradScaler("cpu").get_scale() == 65536
    smallest = torch.tensor(6e-8, dtype=torch.float16)
    assert smallest > 0
    assert smallest / 4 == 0


def test_autocast_leaves_double_as_it_is() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert nn.Linear(2, 2, dtype=torch.float64)(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float16


def test_the_old_name_of_the_scaler_warns() -> None:
    with pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler\('cuda'"):
        torch.cuda.amp.GradScaler(enabled=False)


def _norms(world: World) -> str:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    try:
        model(torch.randn(4, 3))
    except ValueError as error:
        return str(error)
    return ""


def test_sync_batch_norm_raises_on_a_cpu_in_training() -> None:
    assert all("GPU" in said for said in run_ranks(_norms, 2))
