"""The words of the command line, and configs written as flags."""

import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lockstep.commands.shared.arguments import parse, train_arguments
from lockstep.config import Config, DataConfig
from lockstep.config.flags import as_command, known_flags, split_arguments
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError
from tests.configs import configs


def parsed(default: Config, words: list[str]) -> Config:
    free, rest = split_arguments(words, Config)
    assert not free
    made: Config = parse(Config, default, rest, "test", "")
    return made


@settings(max_examples=40, deadline=None)
@given(configs)
def test_a_config_written_as_a_command_gives_this_config_again(config: Config) -> None:
    words = shlex.split(as_command("lockstep train digits", config).replace("\\\n", ""))
    assert words[:3] == ["lockstep", "train", "digits"]
    assert parsed(Config(recipe=config.recipe), words[3:]) == config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_itself_on_top_of_any_other(name: str) -> None:
    words = shlex.split(as_command("lockstep", recipe(name)).replace("\\\n", ""))[1:]
    for other in RECIPES:
        base = recipe(other)  # an empty value is left out of the command: it is not there to be undone
        base = replace(
            base,
            data=replace(base.data, augment=()),
            model=replace(base.model, init="", adapt_init=False),
            optim=replace(base.optim, schedule="cosine", milestones=()),
            execution=replace(base.execution, cache=""),
        )
        assert parsed(base, words) == replace(recipe(name), recipe=other)


def test_short_names_and_other_spellings() -> None:
    flags = known_flags(Config)
    for name in ("--lr", "--learning-rate", "--ip", "--port", "--nproc", "--nproc-per-node", "--flip", "--no-flip"):
        assert name in flags
    assert "--recipe" not in flags  # the name of the recipe is a word of its own
    config = parsed(
        Config(), ["--lr=0.5", "--batch_size", "32", "--port", "4000", "--gpus", "0, 2", "--log", "csv,wandb"]
    )
    assert (config.optim.lr, config.batch_size, config.execution.master_port) == (0.5, 32, 4000)
    assert (config.execution.gpus, config.execution.log) == ((0, 2), ("csv", "wandb"))


def test_other_words_are_sorted_out_wherever_they_stand() -> None:
    assert split_arguments(["mnist", "--flip", "--epochs", "3", "more", "--lr", "-1"], Config) == (
        ["mnist", "more"],
        ["--flip", "--epochs", "3", "--lr", "-1"],
    )
    assert split_arguments(["--flip", "mnist"], Config) == (["mnist"], ["--flip"])
    assert split_arguments(["--sync_bn", "mnist"], Config) == (["mnist"], ["--batch-norm", "global"])
    assert split_arguments(["--no-sync-bn"], Config) == ([], ["--batch-norm", "local"])


def test_a_flag_of_several_values_takes_all_words_up_to_the_next_flag_and_comes_twice() -> None:
    words = ["mnist", "--augment", "randaugment:2,9", "colorjitter:0.4, hue=( 0.1, 0.2)", "--flip", "--epochs", "3"]
    positional, rest = split_arguments([*words, "--augment=a:1 b", "more"], Config)
    assert positional == ["mnist", "more"]
    assert rest[:3] == ["--flip", "--epochs", "3"]
    expected = ("randaugment:2,9", "colorjitter:0.4,hue=(0.1,0.2)", "a:1", "b")
    config = parsed(Config(), [*words[1:], "--augment=a:1 b"])
    assert config.data.augment == expected
    again, (at, *_) = train_arguments(config), [i for i, w in enumerate(train_arguments(config)) if w == "--augment"]
    assert tuple(again[at + 1 : at + 5]) == expected
    assert parsed(recipe("digits"), again[2:]) == config
    assert parsed(config, ["--augment="]).data.augment == ()
    assert parsed(config, ["--augment", "one"]).data.augment == ("one",)  # in place of the recipe's
    assert Config.from_dict(config.to_dict()) == config
    assert DataConfig(augment=["a", "b"]) == DataConfig(augment="a b") == DataConfig(augment=("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds a space"):
        DataConfig(augment=("colorjitter:0.4, 0.4",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--augment"], "--augment stands at the end without its value"),
        (["--bacth-size", "3"], "unknown flag '--bacth-size'\n  Did you mean --batch-size"),
        (["-x"], "unknown flag '-x'"),
        (["--epochs"], "--epochs stands at the end without its value"),
        (["--epochs", "x"], "--epochs x: not a whole number"),
        (["--epochs", "1.5"], "--epochs 1.5: not a whole number"),
        (["--lr", "fast"], "--lr fast: not a number"),
        (["--nproc", "all"], "--nproc all: not a whole number\n  Give a whole number or auto."),
        (["--gpus", "0,b"], "--gpus 0,b: not whole numbers with commas between them"),
        (
            ["--schedule", "cosin"],
            "'cosin'\n  Did you mean cosine or timm:cosine? --schedule takes constant, linear, step",
        ),
        (["--precision=fp31"], "unknown precision 'fp31'"),
        (["--flip=yes"], "--flip=yes: the flag takes no value"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        split_arguments(words, Config)
    assert message in str(caught.value)
