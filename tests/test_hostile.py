"""The generator of hostile cases: its judge tells right from wrong, its cases are sound, and the law holds for some."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile import plain, runs
from tests.hostile.__main__ import judge_all, shrink
from tests.hostile.cases import FEATURES, LOOP, WEIGHTS, Case, compatible, generate, smaller
from tests.hostile.runs import Run, Verdict, check, differences, judge
from tests.warm import server

SCRIPT = """
import os, sys, time
import numpy as np
from safetensors.numpy import save_file
n, folder, seed, epochs = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
weight = np.ones(3)
{body}
save_file({{"fc.weight": weight, "calls": np.array([7])}}, folder + "/final.safetensors")
"""
NOTE = 'print(f"note: the weights will differ by about {n * 1.5} % on {n} processes: conv passes a hook")'
REFUSAL = 'print("lockstep: conv passes a hook", file=sys.stderr); sys.exit(2)'
LOST = 'print("note: no checkpoint holds slow, which training moves: a run that is resumed goes on otherwise")'
KNOWN = {
    "equal": "weight += 1e-14 * n",
    "equal: a resume loses something": LOST,
    "silent: a resume loses something": f"weight *= n\n{LOST}",
    "words: a resume loses something on one N": f"if n == 2: {LOST}",
    "silent": "weight[1] += 1e-6 * n",
    "silent: another shape": "weight = np.ones(2 + n)",
    "silent: one N says nothing": f"weight *= n\nif n < 3: {NOTE}",
    "silent: one N trains": f"if n > 1: {REFUSAL}",
    "warned": f"weight *= n\n{NOTE}",
    "warned: only longer runs differ": f"weight *= n if epochs > 2 else 1\n{NOTE}",
    "refused": REFUSAL,
    "words": f"weight *= n\nif n < 3: {NOTE}\nelse: print('note: fc differs')",
    "words: one N refuses": f"weight *= n\n{NOTE}\nif n == 2: sys.exit(2)",
    "false alarm": NOTE,
    "false alarm: on one N": f"if n == 2: {NOTE}",
    "crash": "if n == 3: raise ValueError('of torch')",
    "crash: by a signal": "if n == 2: os.abort()",
    "hang": "if n == 2: sys.exit(124)",
}


@dataclass(frozen=True)
class Script(Case):
    """A case whose module is known."""

    body: str = ""

    def source(self) -> str:
        return SCRIPT.format(body=self.body)


# of the fixed cases those that are wrong: a list to be shortened
OPEN = {
    14: "a loop that ends by one process's loss: one process alone can't see it",
    18: "a loop that lowers the rate by one process's loss: likewise",
}


THREADED = """
import threading
import lockstep as ls

def rank(world):
    return world.rank

if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # no fork then, but a fresh interpreter
    print(ls.launch(rank, nproc=2))
"""


def test_a_script_is_found_by_the_fresh_interpreters_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(THREADED)
    assert runs.execute(tmp_path, ["case.py"]) == (0, "[0, 1]\n")


@pytest.mark.slow
def test_the_judge_tells_right_from_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(name: str) -> Verdict:
        return check(Script("known", (), loop=True, body=KNOWN[name]), tmp_path / name)

    server()
    (tmp_path / "sound.py").touch()
    monkeypatch.setattr(runs, "PLAIN", tmp_path / "sound.py")  # these scripts are no models
    with ThreadPoolExecutor(2) as pool:
        for name, found in zip(KNOWN, pool.map(verdict, KNOWN), strict=True):
            assert found.kind == name.split(":")[0], f"{name}: {found.story}"
            assert found.right == (name.split(":")[0] in ("equal", "warned", "refused"))
    monkeypatch.undo()
    lazy = Case("x", ("shape.lazy_layer", "hook.nan_to_num"))  # a hook on a parameter that is not there yet
    assert check(lazy, tmp_path / "lazy").kind == "broken"
    monkeypatch.setattr(runs, "DEADLINE_S", 0.5)
    assert check(Script("x", (), loop=True, body="time.sleep(60)"), tmp_path / "x").kind == "hang"


def test_exact_mode_is_equal_to_the_bit_alone() -> None:
    same, near = (
        Run(n, 0, "", {"w": torch.tensor([1.0, value], dtype=torch.float64)}) for n, value in ((1, 2), (2, 2 + 1e-13))
    )
    assert judge([same, near]).kind == "equal"
    assert judge([same, near], exact=True).kind == "silent"
    assert judge([same, replace(same, processes=2)], exact=True).kind == "equal"


def test_differences_are_relative_and_see_every_kind_of_tensor() -> None:
    def apart(one: Any, other: Any) -> float:
        return differences([Run(1, 0, "", {"w": torch.tensor(one)}), Run(2, 0, "", {"w": torch.tensor(other)})])[0]

    assert apart([0.0, 4.0], [0.0, 5.0]) == 0.25
    assert apart([3, 2], [3, 3]) == pytest.approx(1 / 3)
    assert apart([True], [False]) == 1
    assert apart([1j], [2j]) == 1
    assert apart([0.0], [1e-12]) < runs.TOLERANCE  # nothing but rounding, as of a bias in front of batch norm
    assert apart([float("nan"), 1.0], [float("nan"), 1.0]) == 0
    assert apart([float("nan")], [1.0]) == apart([float("inf")], [1.0]) == apart([1.0], [1.0, 2.0]) == float("inf")


def test_sentences_are_compared_without_numbers_places_and_others_warnings() -> None:
    def said(text: str) -> frozenset[str]:
        return Run(1, 0, text, {}).said

    one = said("note: about 2.5 % between 1 process and 2: layer3.conv\n")
    assert (
        one
        == said("note: about 1e-3 % between 1 process and 3: layer3.conv\n")
        != said("note: about 2 %: layer4.conv\n")
    )
    assert said("/a/case.py:3: UserWarning: conv draws\n  x = 1\n") == said(
        "/b/case.py:9: UserWarning: conv draws\n  y\n"
    )
    assert not said(
        "/a/site-packages/torch/x.py:3: UserWarning: deprecated\n  code\n[rank0]:[W12 reducer.cpp] Warning: x\n"
    )
    traceback = (
        "Traceback (most recent call last):\n  File 'x', line 3\nlockstep.{}: conv passes a hook\n  Remove it.\n"
    )
    alone, of_a_rank = (
        Run(1, 1, traceback.format(e), {}) for e in ("errors.UserError", "failures.WorkerFailed: rank 1")
    )
    assert alone.said == of_a_rank.said == {"conv passes a hook", "Remove it."}
    assert alone.end == of_a_rank.end == "refused"
    assert Run(1, 1, traceback.format("failures.WorkerFailed: rank 1: killed by SIGABRT"), {}).end == "crash"
    assert (
        Run(1, 1, "lockstep: rank 1: conv passes a hook\n  called at /a/case.py:3: step(batch)\n", {}).end == "refused"
    )
    assert Run(1, 1, "lockstep: rank 1: was killed by SIGABRT\n", {}).end == "crash"


@pytest.mark.slow
def test_a_seed_makes_a_case_and_a_case_shrinks_to_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [generate(5, number, 0.3) for number in range(1200)]
    assert cases == [generate(5, number, 0.3) for number in range(1200)]
    assert {name for case in cases for name in case.features} == set(FEATURES)
    assert {case.exact for case in cases} == {0, 4}
    for case in cases:
        compile(case.source(), case.name, "exec")
        assert all(less.features and len(less.features) <= len(case.features) for less in smaller(case))

    def blames_hooks(case: Case, folder: Path) -> Any:
        guilty = any(name.startswith("hook.") for name in case.features)
        return judge([Run(n, 0, "", {"w": torch.tensor([float(n if guilty else 1)])}) for n in (1, 2)])

    monkeypatch.setattr("tests.hostile.__main__.check", blames_hooks)
    case = Case("x", ("draw.dropout", "hook.clip_value", "norm.batch"), 4)
    least, verdict = shrink(case, blames_hooks(case, tmp_path), tmp_path)
    assert (least.features, least.exact, verdict.kind) == (("hook.clip_value",), 0, "silent")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, as on scripts and hooks
def test_each_feature_trains_in_plain_pytorch(tmp_path: Path) -> None:
    random.seed(0)
    for feature in FEATURES.values():
        assert feature.kind in WEIGHTS
        assert compatible((feature,))
        if feature.kind not in ("loop", "size", "flag"):
            case = Case("x", (feature.name,), loop=bool(LOOP & set(feature.slots)))
            (tmp_path / "case.py").write_text(case.source())
            assert all(0 <= value < 50 for value in plain.train(tmp_path / "case.py")), feature.name


@pytest.mark.slow
def test_the_law_holds_for_hostile_cases(tmp_path: Path) -> None:
    found = judge_all([generate(0, number, 0.3) for number in range(20) if number not in OPEN], tmp_path)
    assert set(found) <= set(runs.RIGHT), f"python -m tests.hostile --count 20: {Counter(found)}"
