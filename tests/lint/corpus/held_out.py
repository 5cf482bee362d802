"""The corpus of the lint rules: its files, what each is expected to say, and which part is kept aside.

A right script is `right/FAMILY.py` or the folder `right/FAMILY`; a wrong one is `wrong/FAMILY__FAULT`, with one fault.
First line of a file: `# expect: none`, or `# expect: KEYWORD line N or M or data.py:K`. N is where the fault is; a
report may name the others as well, of this file or of another of the program. Keywords stand in keywords.toml.

What is held out was written without sight of the rules, and no rule was written with its faults in view: the figures of
this part say how the rules do on code not seen before. It goes by families, for the scripts of one share most of their
lines.
"""

import re
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent
FIRST = re.compile(
    r"# expect: (?:none|(?P<keyword>(?!none\b)[a-z-]+) line (?P<line>\d+)(?P<others>(?: or (?:[\w./]+\.py:)?\d+)*))"
)

HELD_OUT = frozenset(
    {
        "accel_food_dataclass",
        "accelerate_reviews",
        "distill_ema",
        "dogs_timm_mixup_ema",
        "emnist_forked_inmemory",
        "fabric_denoiser",
        "fabric_dtd_vit",
        "fashion_spawn_homework",
        "fsdp2_charlm",
        "fsdp_scenes_vit",
        "horovod_gtsrb",
        "horovod_tabular",
        "ignite_aircraft",
        "ignite_birdsong",
        "kaggle_melanoma_kfold",
        "landcover_multilabel",
        "lightning_voltage",
        "lit_fungi_datamodule",
        "organ_segmentation",
        "pets_torchrun_amp",
        "phonon_regressor",
        "plants_repo",
        "slurm_cxr_yaml",
        "spawn_logger",
        "spot_elastic",
        "torchrun_tutorial",
        "weighted_defects",
        "weld_inspection",
    }
)


@dataclass(frozen=True)
class Expected:
    """One fault: what, in which file, on which line; or in which other places a report is as good."""

    keyword: str
    file: Path
    line: int
    others: tuple[tuple[Path, int], ...] = ()


@dataclass(frozen=True)
class Script:
    """A program: its file or folder, and its fault, None where it is right."""

    path: Path
    fault: Expected | None

    @property
    def family(self) -> str:
        return self.path.stem.partition("__")[0]

    @property
    def held_out(self) -> bool:
        return held_out(self.family)

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.rglob("*.py")) if self.path.is_dir() else [self.path]


def held_out(family: str) -> bool:
    """Whether a family is kept aside."""
    return family in HELD_OUT


def expected(path: Path) -> Expected | None:
    """What a file's first line says. AssertionError where it says nothing that one can read."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    found = FIRST.fullmatch(first)
    assert found, f"{path}: first line {first!r}"
    if found["keyword"] is None:
        return None
    places = re.findall(r" or (?:([\w./]+\.py):)?(\d+)", found["others"])
    others = tuple(((path.parent / name).resolve() if name else path, int(number)) for name, number in places)
    return Expected(found["keyword"], path, int(found["line"]), others)


def scripts(kind: str) -> list[Script]:
    """All programs of `right` or `wrong`, by name. AssertionError for one with several faults."""
    found = []
    for path in sorted((CORPUS / kind).iterdir()):
        if path.suffix != ".py" and not any(path.rglob("*.py")):
            continue  # caches
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        faults = [fault for fault in map(expected, files) if fault is not None]
        assert len(faults) <= 1, f"{path}: {len(faults)} faults"
        found.append(Script(path, faults[0] if faults else None))
    return found
