"""A run folder that names code: no command that reads it runs that, unless it is told to."""

import copy
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load

import lockstep as ls
from lockstep.checkpoint import weights
from lockstep.cli import main
from lockstep.config import Config, DataConfig, ModelConfig
from lockstep.distributed.files import to_json
from lockstep.errors import UserError
from tests.commands import reports
from tests.inference.runs import config, leave_a_run

_CODE = """from pathlib import Path
Path(__file__).with_name("ran").touch()
def make(*args, **kwargs): raise RuntimeError("made")
"""
NAMED: dict[str, Callable[[Config], Config]] = {
    "model": lambda own: replace(own, model=ModelConfig(model="hostile:make")),
    "data": lambda own: replace(own, data=DataConfig(dataset="hostile:make")),
    "optimizer": lambda own: replace(own, optim=replace(own.optim, optimizer="hostile:make")),
    "augment": lambda own: replace(own, data=replace(own.data, augment=("hostile:make",))),
    "recipe": lambda own: replace(own, recipe="hostile:make"),
}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Somebody's run folder, beside a module that notes its import; the module can be imported."""
    (tmp_path / "hostile.py").write_text(_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    run = tmp_path / "run"
    run.mkdir()
    yield leave_a_run(run)
    sys.modules.pop("hostile", None)


def name_code(run: Path, *kinds: str) -> None:
    changed = config(run / "data")
    for kind in kinds:
        changed = NAMED[kind](changed)
    (run / "config.json").write_text(to_json(changed.to_dict()))
    records = [reports.run(1.0, config=changed.to_dict()), reports.evaluation(2.0, 3, 0), reports.end(3.0, 3)]
    (run / "journal.jsonl").write_text("".join(to_json(record) + "\n" for record in records))
    best = run / "weights" / "best.safetensors"
    note = weights.read_metadata(best)
    model = {"model": "hostile:make"} if "model" in kinds else {}
    weights.write_sealed(load(best.read_bytes()), best, note | model)  # as who forges it can


COMMANDS: dict[str, tuple[str, set[str]]] = {  # the words after the run folder; by which names of code it is refused
    "eval": ("", set(NAMED)),
    "eval --data {run}/data/val": ("", set(NAMED)),
    "predict": ("{run}/data/val", {"model"}),
    "export --to onnx": ("", {"model"}),
    "export --to safetensors": ("", set()),
    "export --to torch": ("", set()),
    "preview": ("", set(NAMED)),
    "report": ("--mistakes 2", set()),
    "report --json x.json": ("", set()),
    "report --no-pictures": ("", set()),
    "report {run}": ("", set()),
    "show": ("", set()),
    "show --toml": ("", set()),
    "diff {run}": ("", set()),
    "runs": ("", set()),
    "watch": ("--once", set()),
    **{
        f"{command} --config {{run}}/config.json": (flags, set(NAMED))
        for command, flags in {
            "train": "--epochs 1",
            "verify": "",
            "chaos": "",
            "compare": "",
            "tune": "",
            "sweep": "--vary seed=0,1",
            "lr-find": "",
            "forecast": "",
            "launch-script torchrun": "",
            "preview": "",
        }.items()
    },
}


# a refusal takes a moment, to go through with the command seconds: with all names at once that it does not need
EACH = [
    pytest.param(command, (kind,)) for command, (_, refused) in COMMANDS.items() for kind in NAMED if kind in refused
]
EACH += [
    pytest.param(command, kinds, marks=pytest.mark.slow)
    for command, (_, refused) in COMMANDS.items()
    if (kinds := tuple(kind for kind in NAMED if kind not in refused))
]


@pytest.mark.parametrize(
    ("command", "kinds"), EACH, ids=lambda given: given if isinstance(given, str) else "+".join(given)
)
def test_code_that_a_run_folder_names_is_refused_or_not_needed(
    command: str, kinds: tuple[str, ...], hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_code(hostile, *kinds)
    more, refused = COMMANDS[command]
    first, *flags = command.format(run=hostile).split()
    named = [] if "--config" in flags else [str(hostile)]
    with pytest.raises(SystemExit) as end:
        main([first, *named, *flags, *more.format(run=hostile).split()])
    told = capsys.readouterr()
    is_refused = kinds[0] in refused
    assert end.value.code == (2 if is_refused else 0), told
    assert not hostile.with_name("ran").exists(), told
    assert "hostile" not in sys.modules
    assert ("names code that this would run" in told.err and "--trust-code" in told.err) == is_refused, told


def test_the_same_code_runs_where_it_is_trusted(hostile: Path) -> None:
    name_code(hostile, "model")
    with pytest.raises(UserError, match="names code that this would run: model hostile:make"):
        ls.load(hostile)
    assert not hostile.with_name("ran").exists()
    with pytest.raises((UserError, RuntimeError)):
        ls.load(hostile, trust_code=True)
    assert hostile.with_name("ran").exists()


class _Watch:
    """Notes every module whose name begins with `hostile` that anything tries to import."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("hostile"):
            self.asked.append(name)


def _leaves(values: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(values, dict | list) and values:
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*before, name))
    else:
        yield before


def _forged(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(values)
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return made


_SPELLINGS: list[Any] = [
    *("hostile:make", "hostile_b.c:d.e", "hostile:", ":hostile", "hostile.make", "hostile:make:x", "timm:hostile:x"),
    *("tv:hostile:make", "hf:hostile:make", "table:hostile:make", ["hostile:make"], ["flip", "hostile:make"]),
]


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_hostile_fields_import_nothing(
    count: int, hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any entry of a config, a journal and a card may name code, in any spelling."""
    watch, seed = _Watch(), int(os.environ.get("LOCKSTEP_FUZZ_SEED", "0"))
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    random = Random(seed)
    whole = json.loads(to_json(config(hostile / "data").to_dict()))
    records = [reports.run(1.0, config=whole), reports.evaluation(2.0, 3, 0), reports.end(3.0, 3)]
    plain = json.loads(to_json(records))
    best = hostile / "weights" / "best.safetensors"
    tensors, note = load(best.read_bytes()), weights.read_metadata(best)
    commands = ["eval {run}", "preview {run}", "export {run} --to onnx", "report {run} --no-pictures", "show {run}",
        "diff {run} {run}", "runs", "watch {run} --once", "train --config {run}/config.json --out x",
        "launch-script slurm --config {run}/config.json"]  # fmt: skip
    monkeypatch.setattr("lockstep.commands.evaluate.launched", lambda *_, **__: 0)  # what is not refused need not run
    monkeypatch.setattr("lockstep.commands.train.launched", lambda *_, **__: 0)
    monkeypatch.setattr("lockstep.commands.preview.draw", lambda *_: None)
    monkeypatch.setattr("lockstep.commands.export._write_program", lambda *_: None)
    for _ in range(count):
        made, told, said, value = whole, plain, note, random.choice(_SPELLINGS)
        match random.choice(["config", "config", "journal", "card"]):
            case "config":
                made = _forged(whole, random.choice(list(_leaves(whole))), value)
            case "journal":
                told = _forged(plain, random.choice(list(_leaves(plain))), value)
            case "card":
                said = note | {random.choice(sorted(note)): value if isinstance(value, str) else json.dumps(value)}
        (hostile / "config.json").write_text(json.dumps(made))
        (hostile / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in told))
        if said is not note:
            weights.write_sealed(tensors, best, said)
            commands_now = ["predict {run} {run}/data/val", "export {run} --out x.safetensors"]
        else:
            commands_now = [random.choice(commands)]
        for command in commands_now:
            with pytest.raises(SystemExit):
                main(command.format(run=hostile).split())
    assert not watch.asked, f"seed {seed}: {watch.asked}"
    assert not hostile.with_name("ran").exists()
    capsys.readouterr()
