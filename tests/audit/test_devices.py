"""What is said of ranks and GPUs, from records written by hand."""

from typing import Any

import pytest

from lockstep.commands.audit.command import Audit
from lockstep.commands.audit.findings.ranks import ordinals, shared_gpus
from lockstep.commands.audit.launch import _environment
from lockstep.commands.audit.records import Record
from lockstep.errors import UserError


def record(*uses: list[tuple[int, str]], nodes: int = 1) -> Record:
    def events(mine: list[tuple[int, str]]) -> list[dict[str, Any]]:
        return [{"event": "device", "index": index, "how": how, "at": f"{how}.py:{index}"} for index, how in mine]

    def process(rank: int) -> list[dict[str, Any]]:
        return [{"event": "process", "node": rank * nodes // len(uses)}, {"event": "group", "world": len(uses)}]

    return Record(len(uses), {rank: process(rank) + events(mine) for rank, mine in enumerate(uses)})


def told(*uses: list[tuple[int, str]]) -> list[tuple[str, str, str]]:
    return [(each.code, each.at, each.says) for each in shared_gpus([record(*uses)])]


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


def test_each_machine_has_gpus_of_its_own() -> None:
    four = [[(0, "tensor")], [(1, "tensor")]] * 2
    assert [each.code for each in shared_gpus([record(*four)])] == ["LS303", "LS303"]
    assert list(shared_gpus([record(*four, nodes=2)])) == []
    one = [[(0, "tensor")]] * 4
    assert [each.says[:24] for each in shared_gpus([record(*one, nodes=2)])] == [
        "ranks 0 and 1 all use cu",
        "ranks 2 and 3 all use cu",
    ]


def test_local_ranks_and_machines_are_those_of_torchrun() -> None:
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE"
    found = [[int(_environment(rank, 4, 2)[name]) for name in names] for rank in range(4)]
    assert found == [[0, 0, 2, 0, 2, 4], [1, 1, 2, 0, 2, 4], [2, 0, 2, 1, 2, 4], [3, 1, 2, 1, 2, 4]]
    with pytest.raises(UserError, match="no number of --nproc is divided by 3 machines"):
        Audit(nproc=(1, 2, 4), nnodes=3)
    assert Audit(nproc=(1, 4), nnodes=2).nnodes == 2
    failed = record([(0, "tensor")], [(0, "tensor")], nodes=2)
    error = "RuntimeError: CUDA error: invalid device ordinal (cuda:1 of 1 pretended GPUs)"
    failed.ranks[1].append({"event": "end", "how": "error", "at": "t.py:9", "error": error})
    for rank, events in failed.ranks.items():
        events[:] = [each | {"pid": 6 + rank} for each in events]
    (finding,) = ordinals([failed])
    assert (finding.code, finding.says) == ("LS303", f"rank 1, local rank 0 of machine 1, failed with {error}")
