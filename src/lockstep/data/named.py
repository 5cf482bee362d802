"""Sources of pictures by name: `table:FILE`, `hf:NAME`, `tv:NAME`, with options behind: `table:FILE:label=breed`."""

from collections.abc import Collection

from lockstep.errors import UserError, unknown

KINDS = ("table", "hf", "tv")


def kind_of(dataset: str) -> str:
    """Which of the kinds a data set's name is of; empty for every other name."""
    kind, colon, _ = dataset.partition(":")
    return kind if colon and kind in KINDS else ""


def is_code(dataset: str) -> bool:
    """True for a name of the form package.module:factory."""
    return ":" in dataset and not kind_of(dataset)


def parse(dataset: str, options: Collection[str]) -> tuple[str, dict[str, str]]:
    """The name behind the kind, and the options behind the name: `hf:NAME:image=photo,label=breed`.

    Raises:
        UserError: for an empty name, and an option that the kind doesn't have, or that is empty.
    """
    kind, _, name = dataset.partition(":")
    before, colon, after = name.rpartition(":")
    given: dict[str, str] = {}
    if colon and "=" in after:
        name = before
        for part in after.split(","):
            key, _, value = part.partition("=")
            if key.strip() not in options:
                raise unknown(f"option of {kind}:", key.strip(), options)
            if not value.strip():
                raise UserError(f"--dataset {dataset}: {key.strip()} is empty", f"As {kind}:NAME:{key.strip()}=VALUE.")
            given[key.strip()] = value.strip()
    if not name.strip():
        raise UserError(
            f"--dataset {dataset} names nothing", f"As {kind}:{'photos.csv' if kind == 'table' else 'NAME'}."
        )
    return name, given
