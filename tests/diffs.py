"""Edits as pages and tests write them: a line that begins with + is new, one with - goes, the others say where."""

import re


def places(diff: str) -> list[tuple[str, str, str]]:
    """File, lines before and lines after of each place: `+++ FILE` begins a file, `@@` parts its places."""
    found = []
    for of_file in re.split(r"^\+\+\+ ", diff, flags=re.MULTILINE)[1:]:
        file, _, body = of_file.partition("\n")
        for place in re.split(r"^@@\n", body, flags=re.MULTILINE):
            lines = place.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
            after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
            assert before != after, place
            assert before, f"it does not say where: {place}"
            found.append((file, before, after))
    return found


def edited(text: str, place: tuple[str, str, str]) -> str:
    """The file's text with the lines after in place of those before, which it has once."""
    file, before, after = place
    assert f"\n{text}".count(f"\n{before}") == 1, f"{file} does not have this once:\n{before}"
    return f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]
