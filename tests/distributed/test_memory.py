"""What becomes of freed memory."""

import subprocess
import sys

import pytest
import torch

from lockstep.distributed.devices import peak_gib

FAULTS = """
import os, resource, sys
import torch
from lockstep.distributed.devices import keep_freed
kept = keep_freed() if sys.argv[1] == "keep" else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(40 * 2**18)  # 40 MB: above what malloc would ever keep of itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()  # the heap settles
print(kept, faults())
"""


def pages_faulted(how: str, **environment: str) -> tuple[str, int]:
    out = subprocess.run(
        [sys.executable, "-c", FAULTS, how], env=environment, check=True, capture_output=True, text=True
    ).stdout
    kept, faults = out.split()
    return kept, int(faults)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_that_a_step_freed_is_there_for_the_next() -> None:
    _, without = pages_faulted("plain", THP_MEM_ALLOC_ENABLE="0")
    kept, within = pages_faulted("keep")
    assert kept == "True"
    assert within < without / 10
    assert pages_faulted("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False", "somebody's own settings stay"


def test_the_peak_holds_what_was_held() -> None:
    before = peak_gib(torch.device("cpu"))
    held = torch.ones(2**28)  # 1 GiB
    assert peak_gib(torch.device("cpu")) >= max(before, held.nbytes / 2**30)
