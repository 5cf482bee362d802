"""Processes that were started for different runs: all end with the same sentence, before anything is trained."""

import dataclasses
import shutil
import socket
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.config import Config
from lockstep.config.fields import flattened
from lockstep.distributed.rendezvous import different
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.run_folder import OF_A_MACHINE, require_same_config
from tests.ranks import run_ranks
from tests.subprocesses import Command


def other_values(config: Config) -> dict[str, Config]:
    """By entry, the config with another value there, as if a machine had been given it."""
    made = {}
    for path, value in flattened(config.to_dict()).items():
        changed = config.to_dict()
        *groups, name = path.split(".")
        group = changed
        for each in groups:
            group = group[each]
        group[name] = _another(value)
        made[path] = _unchecked(Config, changed)
    return made


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["other"] if isinstance(value, list) else "other"


def _unchecked(cls: Any, values: dict[str, Any]) -> Any:
    """The dataclass of these values, whether they make a run or not."""
    made = object.__new__(cls)
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        value = values[item.name]
        nested = dataclasses.is_dataclass(hints[item.name])
        object.__setattr__(made, item.name, _unchecked(hints[item.name], value) if nested else value)
    return made


def refusals(world: World) -> dict[str, str]:
    """What each rank says where rank 1 has another value in one entry; empty where it says nothing."""
    said, plain = {}, Config()
    for path, changed in other_values(plain).items():
        try:
            require_same_config(world, changed if world.rank == 1 else plain)
            said[path] = ""
        except UserError as error:
            said[path] = error.message
    return said


def test_every_flag_that_is_not_a_machine_s_own_is_compared() -> None:
    first, *others = run_ranks(refusals, 3)
    assert all(each == first for each in others), "the same sentence on all ranks"
    host = socket.gethostname()
    for path, message in first.items():
        name = path.rpartition(".")[2]
        flag = f"--{name.replace('_', '-')}"
        assert (message == "") == (name in OF_A_MACHINE), path
        if message:
            assert f"{flag} is " in message
            assert f"on rank 0 ({host}) and" in message
            assert f"on rank 1 ({host})" in message


def test_the_sentence_names_a_few_differences() -> None:
    assert different([{"a": "1"}, {"a": "1"}], ["x", "y"]) is None
    error = different([{f"--f{k}": str(k) for k in range(7)}, {}], ["x", "y"])
    assert error is not None
    assert "--f0 is 0 on x and not set on y" in error.message
    assert "and 2 more" in error.message


def two_machines(tmp_path: Path, first: list[str], second: list[str], **how: Any) -> tuple[str, str]:
    """What two commands that meet over the loopback say; both have to end with exit code 2 and leave nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = ["--nproc", "1", "--nnodes", "2", "--threads", "1", "--out", "run"]
    meeting = f"--master-addr 127.0.0.1 --master-port {port} --collective-timeout 60 --hang-timeout 9".split()
    words = (sys.executable, "-m", "lockstep", "train", "digits", "--epochs", "1", *common, *meeting, "--node-rank")
    started = [
        Command(*words, "0", *first, cwd=tmp_path / "0", warm=True),
        Command(*words, "1", *second, cwd=tmp_path / "1", **({"warm": True} | how)),
    ]
    ends = [command.end(60) for command in started]
    for end in ends:
        assert end.code == 2, end.text
        assert not end.orphans
    assert not (tmp_path / "0/run").exists()
    return ends[0].err, ends[1].err


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()


AT_THE_FIRST = [  # what decides how processes meet, or what they import
    pytest.param(flags, 0, marks=pytest.mark.slow)
    for flags in ("--nnodes 3", "--backend gloo", "--strategy fsdp", "--augment randaugment:2,9")
]


@pytest.mark.parametrize(("flags", "machine"), [("--lr 0.1", 1), ("--nnodes 3", 1), *AT_THE_FIRST])
def test_two_machines_with_different_flags(flags: str, machine: int, tmp_path: Path) -> None:
    own: list[list[str]] = [[], []]
    own[machine] = flags.split()
    for said in two_machines(tmp_path, *own):
        assert "the processes were started for different runs: " in said
        assert own[machine][0] in said


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_machine_that_refuses_its_flags_tells_the_others(tmp_path: Path, node: int) -> None:
    own: list[list[str]] = [[], []]
    own[node] = ["--gpus", "0"] if node else ["--model", "resnet19"]
    said = two_machines(tmp_path, *own)
    refused = "--gpus 0: this machine has no such device" if node else "unknown model 'resnet19'"
    assert said[node].startswith(f"lockstep: {refused}")
    assert said[1 - node].startswith(f"lockstep: machine {node} ({socket.gethostname()}): {refused}")


@pytest.mark.slow
def test_two_machines_with_different_data_code_or_versions(tmp_path: Path) -> None:
    for number in range(2):
        for split in ("train", "val"):
            for label in ("a", "b"):
                folder = tmp_path / str(number) / "data" / split / label
                folder.mkdir(parents=True)
                for k in range(6 + number):
                    Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(folder / f"{k}.png")
    data = ["--dataset", "folder", "--data-dir", "data", "--image-size", "8", "--fraction", "1"]
    for said in two_machines(tmp_path, data, data):
        assert "is not the same set in every process: 12 samples in process 0 and 14 in process 1" in said
    net = "from torch import nn\ndef make(*_): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    for number in range(2):
        (tmp_path / str(number) / "own_net.py").write_text(net + f"# {number}\n")
    own = ["--model", "own_net:make"]
    for said in two_machines(tmp_path, own, own):
        assert "the source of own_net is " in said
    newer = tmp_path / "newer/lockstep"
    shutil.copytree(Path(lockstep.__file__).parent, newer, ignore=shutil.ignore_patterns("__pycache__"))
    changed = newer / "errors.py"
    changed.write_text(f"{changed.read_text()}# newer\n")
    for said in two_machines(tmp_path, [], [], warm=False, env={"PYTHONPATH": str(newer.parent)}):
        assert "lockstep's source is " in said
