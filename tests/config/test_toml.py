"""Config -> TOML -> config is the identity, over any base; names are those of flags, and wrong ones are named."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.commands.shared.arguments import planned
from lockstep.config import Config, OptimConfig
from lockstep.config.recipes import RECIPES, recipe
from lockstep.config.toml import applied, read_values, take_file, to_toml
from lockstep.errors import UserError
from tests.configs import configs


@settings(max_examples=60, deadline=None)
@given(configs, st.sampled_from(sorted(RECIPES)))
def test_a_config_as_toml_is_that_config_again_over_any_recipe(config: Config, name: str) -> None:
    values = tomllib.loads(to_toml(config))
    base = recipe(name)
    again = applied(values, base, "x.toml")
    assert {**again.to_dict(), "recipe": ""} == {**config.to_dict(), "recipe": ""}
    assert applied(values, Config(recipe=""), "x.toml") == config
    assert applied(json.loads(json.dumps(config.to_dict())), Config(recipe=""), "config.json") == config


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_survives(text: str) -> None:
    config = Config()
    object.__setattr__(config.execution, "data_dir", text)  # what no flag could hold, as a line's end
    assert tomllib.loads(to_toml(config))["execution"]["data_dir"] == text


def trained_by(*args: str) -> Config:
    config: Config = planned("train", Config, lambda config: config, list(args), "{}")
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
        with pytest.raises(SystemExit) as end:
            main(["show", name, "--toml"])
        assert end.value.code == 0
        file = tmp_path / "shown.toml"
        file.write_text(capsys.readouterr().out)
        assert trained_by("--config", str(file)) == wanted
        assert read_values(str(file))["recipe"] == wanted.recipe


WRONG: list[tuple[str, str]] = [
    ("bacth-size = 3", "unknown entry in {}: 'bacth-size'\n  Did you mean batch_size"),
    ("[optim]\nlearnin_rate = 3", "unknown entry of [optim] in {}: 'learnin_rate'\n  Did you mean learning_rate"),
    ("[optim]\nbatch_size = 3", "unknown entry of [optim] in {}: 'batch_size'"),
    ("[optimiser]\nlr = 3", "unknown table in {}: 'optimiser'\n  Did you mean optim"),
    ("lr = 3\n[optim]\nlearning-rate = 2", "{}: lr and learning-rate are the same entry"),
    ("epochs = 'many'", "{}: config.epochs is 'many'"),
    ("epochs = 0", "{}: --epochs 0 trains nothing"),
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config"], "--config names no file"),
        (["--config", "--lr", "3"], "--config names no file"),
        (["--config", "a", "--config=b"], "--config stands there 2 times"),
    ],
)
def test_the_flag_takes_one_file(args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_file(args)


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
