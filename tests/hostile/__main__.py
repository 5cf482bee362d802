"""Hostile models, losses, optimizers and sets against the law: N changes the speed alone, or the run says why not.

python -m tests.hostile --count 50 --seed 3                   50 cases; prints what is wrong, and a summary
python -m tests.hostile --case 3-17 --keep DIR                one of them again; its module and its runs stay in DIR
python -m tests.hostile --features hook.clip_value,size.last_one [--exact 4 | --loop]

Exit code 3: wrong cases were found. Each is printed with the command that shows it again.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.hostile.cases import Case, generate, smaller
from tests.hostile.runs import RIGHT, Verdict, check
from tests.warm import server

WRONG = 3


def shrink(case: Case, verdict: Verdict, folder: Path) -> tuple[Case, Verdict]:
    """The case with the fewest features that is wrong in the same way."""
    for number, less in enumerate(smaller(case)):
        found = check(less, folder / str(number))
        if found.kind == verdict.kind:
            return shrink(less, found, folder / str(number))
    return case, verdict


def solve(case: Case, keep: Path, shrinks: bool) -> tuple[Case, Verdict, Case, Verdict]:
    """The case and its verdict; where that is wrong also the smallest case alike. Its module stays in `keep`."""
    with tempfile.TemporaryDirectory(prefix=f"hostile-{case.name}-") as scratch:
        verdict = check(case, Path(scratch, "whole"))
        least, why = shrink(case, verdict, Path(scratch)) if shrinks and not verdict.right else (case, verdict)
    if keep != Path():
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{case.name}.py").write_text(least.source())
    return case, verdict, least, why


def describe(case: Case) -> str:
    manner = "own loop" if case.loop else f"--exact {case.exact}" if case.exact else "command"
    return f"{case.name} [{manner}] {', '.join(case.features)}"


def judge_all(
    cases: Sequence[Case], keep: Path, jobs: int = 2, shrinks: bool = True, every: bool = False
) -> Counter[str]:
    """How many cases came to what; prints each that is wrong, or each."""
    found: Counter[str] = Counter()
    causes: Counter[tuple[str, ...]] = Counter()
    began, unnamed = time.monotonic(), 0
    server()  # once, before threads ask for it
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(solve, case, keep, shrinks) for case in cases]):
            case, verdict, least, why = future.result()
            found[verdict.kind] += 1
            unnamed += verdict.kind in ("warned", "refused") and not verdict.names(case.names)
            if every or not verdict.right:
                print(f"{describe(case)}: {verdict.kind}")
                manner = " --loop" if least.loop else f" --exact {least.exact}" if least.exact else ""
                again = f"python -m tests.hostile --features {','.join(least.features)}{manner}"
                print(f"   least: {again}\n   {why.story}", flush=True)
            if not verdict.right:
                causes[(why.kind, "exact" if least.exact else "", *least.features)] += 1
    for cause, times in causes.most_common():
        print(f"{times:4} x {' '.join(filter(None, cause))}")
    wrong = sum(times for kind, times in found.items() if kind not in RIGHT)
    kinds = ", ".join(f"{times} {kind}" for kind, times in sorted(found.items()))
    print(
        f"{len(cases)} cases in {time.monotonic() - began:.0f} s: {kinds}; {wrong} wrong; {unnamed} said without a name"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact-share", type=float, default=0.3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--case", metavar="SEED-NUMBER")
    parser.add_argument("--features", metavar="A,B")
    parser.add_argument("--exact", type=int, default=0)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for the modules of the cases")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--all", action="store_true", help="print each case, right or wrong")
    args = parser.parse_args()
    cases = [generate(args.seed, number, args.exact_share) for number in range(args.first, args.first + args.count)]
    if args.case:
        seed, number = map(int, args.case.split("-"))
        cases = [generate(seed, number, args.exact_share)]
    if args.features:
        cases = [Case("chosen", tuple(args.features.split(",")), args.exact, args.loop)]
    found = judge_all(cases, args.keep, args.jobs, not args.no_shrink, args.all or len(cases) == 1)
    return WRONG if any(kind not in RIGHT for kind in found) else 0


if __name__ == "__main__":
    sys.exit(main())
