"""The words of the command line, and configs written as flags."""

import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lockstep.commands.shared.arguments import parse, train_arguments
from lockstep.config import Config, DataConfig
from lockstep.config.changes import changed
from lockstep.config.fields import flag_names, flags_of, values_of, with_values
from lockstep.config.flags import ADVICE, HABITS, SHORT, as_command, parse_words
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError
from tests.configs import configs


def parsed(default: Config, words: list[str]) -> Config:
    free, made = parse(default, words)
    assert not free
    config: Config = made
    return config


def written(config: Config) -> list[list[str]]:
    values = values_of(config)
    return [flag.words(values[name]) for name, flag in flags_of(config).items() if flag.arg.flag]


@settings(max_examples=40, deadline=None)
@given(configs)
def test_a_config_written_as_a_command_gives_this_config_again(config: Config) -> None:
    words = shlex.split(as_command("lockstep train digits", written(config)).replace("\\\n", ""))
    assert words[:3] == ["lockstep", "train", "digits"]
    assert parsed(Config(recipe=config.recipe), words[3:]) == config
    short = replace(config, recipe="cifar10")  # what differs from a recipe, and what would give way to that
    typed = parse_words(train_arguments(short)[2:], flag_names(Config)).values
    assert with_values(recipe("cifar10"), changed(recipe("cifar10"), typed)[0]) == short


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_itself_on_top_of_any_other(name: str) -> None:
    words = [word for flag in written(recipe(name)) for word in flag]
    for other in RECIPES:
        assert parsed(recipe(other), words) == replace(recipe(name), recipe=other)


def test_other_spellings() -> None:
    flags = flag_names(Config)
    assert "--recipe" not in flags  # the name of the recipe is a word of its own
    assert len(flags_of(Config)) == len({flag.name for flag in flags.values()}) + 1, "names of fields are unique"
    config = parsed(
        Config(), ["--lr=0.5", "--batch_size", "32", "--port", "4000", "--gpus", "0, 2", "--log", "csv,wandb"]
    )
    assert (config.optim.lr, config.batch_size, config.execution.master_port) == (0.5, 32, 4000)
    assert (config.execution.gpus, config.execution.log) == ((0, 2), ("csv", "wandb"))
    assert parsed(config, ["--log", "csv", "--log", "mlflow", "--gpus", "0", "--gpus", "1"]) == config.with_execution(
        log=("csv", "mlflow"), gpus=(1,)
    )
    for none in ("none", "no", "random", "", "None", "NO"):
        assert parsed(Config(), [f"--init={none}"]).model.init == ""
    for flag in (flag for flag in flags.values() if flag.arg.unset == "none"):  # what the help calls it may be typed
        assert flag.read("none") == flag.checked("none") == flag.default


def test_other_words_are_sorted_out_wherever_they_stand() -> None:
    def read(*words: str) -> tuple[list[str], dict[str, object]]:
        found = parse_words(words, flag_names(Config))
        return found.names, found.values

    assert read("mnist", "--flip", "--epochs", "3", "more", "--lr", "1e-3") == (
        ["mnist", "more"],
        {"flip": True, "epochs": 3, "lr": 1e-3},
    )
    assert read("--no-flip", "mnist") == (["mnist"], {"flip": False})
    assert read("--sync_bn", "mnist") == (["mnist"], {"batch_norm": "global"})
    assert read("--no-sync-bn") == ([], {"batch_norm": "local"})
    for words, topic in (
        (["--help", "mnist"], ""),
        (["mnist", "-h", "optim"], "optim"),
        (["--help=all"], "all"),
        (["--dataset", "all"], None),
    ):
        found = parse_words(words, flag_names(Config))
        assert found.help == topic
        assert found.names == [word for word in words if word == "mnist"]


def test_what_is_typed_from_habit_works() -> None:
    typed = ["-b", "32", "-j", "1", "--wd=0.1", "--opt", "adamw", "--output_dir", "x", "-v"]
    config = parsed(Config(), typed)
    assert (config.batch_size, config.execution.workers, config.optim.weight_decay) == (32, 1, 0.1)
    assert (config.optim.optimizer, config.execution.out, config.execution.verbose) == ("adamw", "x", True)
    flags = flag_names(Config)
    for habit, name in [*HABITS.items(), *((short, long) for short, (long, _) in SHORT.items())]:
        assert (habit in flags, name in flags) == (False, True), habit
    assert not {*HABITS} & {*ADVICE, *SHORT}
    assert not {*ADVICE} & {*flags, *SHORT}


def test_a_flag_of_several_values_takes_all_words_up_to_the_next_flag_and_comes_twice() -> None:
    words = ["--augment", "randaugment:2,9", "colorjitter:0.4, hue=( 0.1, 0.2)", "--flip", "--epochs", "3"]
    expected = ("randaugment:2,9", "colorjitter:0.4,hue=(0.1,0.2)", "a:1", "b")
    config = parsed(Config(), [*words, "--augment=a:1 b"])
    assert config.data.augment == expected
    again = train_arguments(config)
    at = again.index("--augment")
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
        (["--augment"], "--augment stands without its value"),
        (["--bacth-size", "3"], "unknown flag '--bacth-size'\n  Did you mean --batch-size"),
        (["-x"], "unknown flag '-x'"),
        (["--epochs"], "--epochs stands without its value"),
        (["--out", "--epochs", "3"], "--out stands without its value"),
        (["--epochs", "x"], "--epochs x is not a whole number"),
        (["--epochs", "1.5"], "--epochs 1.5 is not a whole number"),
        (["--lr", "fast"], "--lr fast is not a number"),
        (["--nproc", "all"], "--nproc all is not a whole number or auto\n  Give a whole number or auto."),
        (["--nproc", "1:4"], "--nproc 1:4 is not a whole number or auto"),
        (["--gpus", "0,b"], "--gpus 0,b is not whole numbers with commas between them"),
        (["--schedule", "cosin"], "'cosin'\n  Did you mean cosine? --schedule takes constant, linear, step"),
        (["--precision=fp31"], "unknown precision 'fp31'"),
        (["--flip=yes"], "--flip=yes: the flag takes no value"),
        (["\u2014epochs", "3"], "\u2014epochs begins with a dash, not with hyphens\n  Type it: --epochs."),
        (["\u2013-lr=1"], "Type it: --lr=1."),
        (["--num-classes", "3"], "--num-classes: classes are counted from the data"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_words(words, flag_names(Config))
    assert message in str(caught.value)
