"""Config -> TOML -> config is the identity, over any base; names are those of flags, and wrong ones are named."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands.shared.arguments import planned
from lockstep.config import Config, OptimConfig
from lockstep.config.fields import with_values
from lockstep.config.files import entries, read_values, to_toml
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError
from tests.configs import configs
from tests.inprocess import said


@settings(max_examples=60, deadline=None)
@given(configs, st.sampled_from(sorted(RECIPES)))
def test_a_config_as_toml_is_that_config_again_over_any_recipe(config: Config, name: str) -> None:
    values = tomllib.loads(to_toml(config))
    assert with_values(recipe(name), entries(values, Config, "x.toml")) == config
    assert Config.from_dict(values, "x.toml") == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_survives(text: str) -> None:
    config = Config()
    object.__setattr__(config.execution, "data_dir", text)  # what no flag could hold, as a line's end
    assert tomllib.loads(to_toml(config))["execution"]["data_dir"] == text


def trained_by(*args: str) -> Config:
    config: Config = planned("train", lambda config: config, list(args), "{}")
    return config


def test_a_file_gives_values_that_flags_change(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "mnist"\nlearning-rate = 0.5\nbatch_size = 32\n[data]\nflip = true\n[optim]\ngamma = 1\n')
    config = trained_by("--config", str(file), "--gamma", "0.25")
    assert config.recipe == "mnist"
    assert (config.optim.lr, config.batch_size, config.data.flip, config.optim.gamma) == (0.5, 32, True, 0.25)
    assert config.model == recipe("mnist").model
    assert trained_by("digits", f"--config={file}").model == recipe("digits").model  # a name that is typed comes first
    (tmp_path / "config.json").write_text(
        json.dumps(Config(recipe="mnist", seed=5).with_execution(out="old").to_dict())
    )
    again = trained_by("--config", str(tmp_path / "config.json"), "--seed", "6")
    assert (again.recipe, again.seed, again.execution.out) == ("mnist", 6, "")  # another run, in a folder of its own


def test_show_prints_what_config_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Config(recipe="cifar10", epochs=3, optim=OptimConfig(lr=0.25))
    (tmp_path / "config.json").write_text(json.dumps(run.to_dict()))
    for name, wanted in (("cifar10-speed", recipe("cifar10-speed")), (str(tmp_path), run)):
        file = tmp_path / "shown.toml"
        file.write_text(said(capsys, "show", name, "--toml")[0])
        assert trained_by("--config", str(file)) == wanted
        assert read_values(str(file))["recipe"] == wanted.recipe


WRONG: list[tuple[str, str]] = [
    ("bacth-size = 3", "unknown entry in {}: 'bacth-size'\n  Did you mean batch_size"),
    ("[optim]\nmomentm = 3", "unknown entry of [optim] in {}: 'momentm'\n  Did you mean momentum"),
    ("[optim]\nbatch_size = 3", "unknown entry of [optim] in {}: 'batch_size'"),
    ("[optimiser]\nlr = 3", "unknown table in {}: 'optimiser'\n  Did you mean optim"),
    ("lr = 3\n[optim]\nlearning-rate = 2", "{}: learning-rate stands there twice"),
    ("epochs = 'many'", "{}: --epochs many is not a whole number"),
    ("epochs = 0", "{}: --epochs 0 is too small"),
    ("epochs 3", "--config {}: can't be read as TOML"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        trained_by("--config", str(file))
    assert message.format(file) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("args", [["--config"], ["--config", "--lr", "3"]])
def test_the_flag_takes_a_file(args: list[str]) -> None:
    with pytest.raises(UserError, match="--config stands without its value"):
        trained_by(*args)


def test_a_file_that_is_not_there_too_large_or_no_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        read_values(str(tmp_path / "none.toml"))
    (tmp_path / "huge.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(UserError, match=r"huge\.toml: 1,048,577 bytes are no config\n  Name another file"):
        read_values(str(tmp_path / "huge.toml"))
    wrong: Any
    for wrong in ([], 3):
        (tmp_path / "x.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="holds no table"):
            read_values(str(tmp_path / "x.json"))
