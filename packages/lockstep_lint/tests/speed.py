"""Files a second on one core: `python tests/speed.py FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lockstep_lint.check import check
from lockstep_lint.rules import all_rules

if __name__ == "__main__":
    started, spent = time.perf_counter(), time.process_time()
    report = check([Path(sys.argv[1])], [*all_rules().values()])
    seconds, busy = time.perf_counter() - started, time.process_time() - spent
    print(f"{report.files} files, {len(report.findings)} findings: {seconds:.1f} s, {busy:.1f} s of them on the CPU")
    print(f"1,000 files in {1000 * busy / max(report.files, 1):.1f} s")
