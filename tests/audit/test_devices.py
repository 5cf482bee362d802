"""What is said of ranks and GPUs, from records written by hand."""

from typing import Any

from lockstep.commands.audit.findings.devices import shared
from lockstep.commands.audit.records import Record


def record(*uses: list[tuple[int, str]]) -> Record:
    def events(mine: list[tuple[int, str]]) -> list[dict[str, Any]]:
        return [{"event": "device", "index": index, "how": how, "at": f"{how}.py:{index}"} for index, how in mine]

    return Record(len(uses), {rank: events(mine) for rank, mine in enumerate(uses)})


def told(*uses: list[tuple[int, str]]) -> list[tuple[str, str, str]]:
    return [(each.code, each.at, each.says) for each in shared([record(*uses)])]


def test_a_gpu_of_its_own_for_each_rank_is_right() -> None:
    assert told([(0, "set_device"), (0, "tensor"), (0, "load")], [(1, "tensor"), (1, "load")]) == []
    assert told([(0, "tensor"), (1, "DataParallel")]) == []
    assert told([], []) == []


def test_ranks_on_one_gpu_are_named() -> None:
    says = "ranks 0, 1 and 2 all use cuda:0: NCCL refuses two ranks on one GPU, and others are idle"
    assert told(*([[(0, "tensor")]] * 3)) == [("LS303", "tensor.py:0", says)]
    says = "ranks 0 and 1 use cuda:0, rank 1 beside cuda:1"
    assert told([(0, "tensor")], [(0, "tensor"), (1, "tensor")]) == [("LS303", "tensor.py:0", says)]


def test_what_is_loaded_onto_another_ranks_gpu_is_told() -> None:
    found = told([(0, "tensor"), (0, "load")], [(1, "tensor"), (0, "load")])
    assert found == [("LS402", "load.py:0", "rank 1 loaded onto cuda:0, rank 0's GPU")]
