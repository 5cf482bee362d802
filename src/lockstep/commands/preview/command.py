"""`lockstep preview`: a picture of what the network sees, before and after augmentation."""

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.commands.shared.arguments import one_name, parse, planned
from lockstep.config import Config, DataConfig
from lockstep.config.fields import require, require_at_least
from lockstep.config.flags import changed_flags, split_arguments
from lockstep.config.toml import take_file

_WHICH = ("dataset", "fraction", "val_fraction", "drop_last", "skip_broken", "follow_links")  # and not how they look


@dataclass(frozen=True)
class Preview:
    """What `lockstep preview` takes beside the flags of a run."""

    out: str = "preview.png"
    """The picture to write; one that is there is written over."""
    samples: int = 6
    """Pictures to show, a row each: the first ones of the run."""
    views: int = 5
    """Epochs to show them in, a column each."""
    trust_code: bool = False
    """Import and call the code that a run folder's config.json names, as --augment package.module:function did."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("out",)})

    def __post_init__(self) -> None:
        require_at_least(1, self, "samples", "views")
        require(max(self.samples, self.views) <= 100, "more than 100 rows or columns", "Show 100 at most.")
        require(self.out.lower().endswith(".png"), f"--out {self.out} is no .png", "Name a file, as preview.png.")


def main(args: list[str]) -> int:
    """Draw what the network sees."""
    about = "Draw what the network sees by `{}`: some pictures as they are, and in several epochs."
    file, words = take_file(args)
    names, rest = split_arguments(words, Preview)
    name = one_name("preview", "recipe or run folder", names)
    if not (name and (Path(name) / "config.json").exists()):
        return _written(planned("preview", Preview, lambda config: Preview(config=config), args, about))
    require(not file, f"preview of {name} has that run's config", "Leave --config out.")
    from lockstep.training.folder import read_config, require_trusted

    config = read_config(name)
    chosen: Preview = parse(Preview, Preview(config=config), rest, f"lockstep preview {name}", about.format(name))
    require_trusted(config, name, chosen.trust_code, trains=True)
    return _written(chosen)


def _written(chosen: Preview) -> int:
    from lockstep.commands.preview.sheet import drawn
    from lockstep.commands.preview.views import views
    from lockstep.processes.files import atomic_write, write_error
    from lockstep.training.folder import check

    check(chosen.config)
    shown, path = views(chosen.config, chosen.samples, chosen.views), Path(chosen.out)
    sheet = drawn(shown, f"{shown.name}: {_settings(chosen.config.data)}")
    try:
        with atomic_write(path) as temporary:
            sheet.save(temporary, "PNG")
    except OSError as error:
        raise write_error(path, error) from error
    height, width = shown.before.shape[2:]
    print(f"{path}: {len(shown.titles)} pictures of {width}x{height}, as they are and in {chosen.views} epoch(s)")
    print(f"  {_settings(chosen.config.data)}")
    for title in shown.titles:
        print(f"  {title}")
    return 0


def _settings(data: DataConfig) -> str:
    """What changes the pictures, as flags."""
    flags = [" ".join(flag) for flag in changed_flags(data, DataConfig(), hidden=_WHICH)]
    return " ".join(flags) or "nothing is changed"
