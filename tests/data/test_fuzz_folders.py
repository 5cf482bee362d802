"""Folders and tables as people leave them, others at each run; the rest of it is `python -m tests.fuzz_folders`."""

import os
import secrets

from tests.fuzz_folders import differences


def test_folders_and_tables_are_read_as_the_page_says() -> None:
    first = int(os.environ.get("LOCKSTEP_FUZZ_SEED") or secrets.randbelow(10**9))
    found = [f"{number}: {line}" for number in range(first, first + 40) for line in differences(number)]
    assert not found, f"`python -m tests.fuzz_folders 1 NUMBER` makes it again: {found}"
