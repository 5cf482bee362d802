"""A run folder that names code: no command that reads it runs that, unless it is told to."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lockstep as ls
from lockstep.checkpoint import weights
from lockstep.cli import main
from lockstep.config import Config, DataConfig, ModelConfig
from lockstep.errors import UserError
from lockstep.processes.files import to_json
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


def name_code(run: Path, kind: str) -> None:
    changed = NAMED[kind](config(run / "data"))
    (run / "config.json").write_text(to_json(changed.to_dict()))
    records = [reports.run(1.0, config=changed.to_dict()), reports.evaluation(2.0, 3, 0), reports.end(3.0, 3)]
    (run / "journal.jsonl").write_text("".join(to_json(record) + "\n" for record in records))
    best = run / "weights" / "best.safetensors"
    note = weights.note_of(best)
    model = {"model": "hostile:make"} if kind == "model" else {}
    weights.write_sealed(load_file(best), best, note | model)  # as who forges it can


COMMANDS: dict[str, tuple[str, set[str]]] = {  # the words after the run folder; by which names of code it is refused
    "eval": ("", {"model", "data"}),
    "predict": ("{run}/data/val", {"model"}),
    "export --to pt2": ("", {"model", "data"}),
    "export --to onnx": ("", {"model", "data"}),
    "export --to safetensors": ("", set()),
    "export --to torch": ("", set()),
    "preview": ("", set(NAMED)),
    "report": ("--mistakes 2", set()),
}


# a refusal takes a moment, to go through with the command seconds
EACH = [
    pytest.param(command, kind, marks=[] if kind in refused else pytest.mark.slow)
    for command, (_, refused) in COMMANDS.items()
    for kind in NAMED
]


@pytest.mark.parametrize(("command", "kind"), EACH)
def test_code_that_a_run_folder_names_is_refused_or_not_needed(
    command: str, kind: str, hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_code(hostile, kind)
    more, refused = COMMANDS[command]
    first, *flags = command.split()
    with pytest.raises(SystemExit) as end:
        main([first, str(hostile), *flags, *more.format(run=hostile).split()])
    told = capsys.readouterr()
    assert end.value.code == (2 if kind in refused else 0), told
    assert not hostile.with_name("ran").exists(), told
    assert "hostile" not in sys.modules
    assert ("names code that this would run" in told.err and "--trust-code" in told.err) == (kind in refused), told


def test_the_same_code_runs_where_it_is_trusted(hostile: Path) -> None:
    name_code(hostile, "model")
    with pytest.raises(UserError, match="names code that this would run: model hostile:make"):
        ls.load(hostile)
    assert not hostile.with_name("ran").exists()
    with pytest.raises((UserError, RuntimeError)):
        ls.load(hostile, trust_code=True)
    assert hostile.with_name("ran").exists()
