"""The matrix of combinations: `python -m tests.matrix --seconds 120 --seed 1`, `--pairs all` for every one.

Every pair of settings that the config accepts, and random triples, train a model of several buckets with a gradient of
zeros, a last batch smaller than the number of processes, and where asked for an infinite image in an awkward step. What
comes out is held against a loop by hand, against one process, against the other ranks, and against itself stopped and
resumed. Where a setting gives a law up by design, as a compressed gradient, what is left of the law is held. Refusals
are listed with their sentences. Exit code 1: something failed.
"""

import argparse
import contextlib
import io
import itertools
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file

from lockstep.config import Config
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests import journals
from tests.matrix_axes import AXES, Choice, Combination, Say, pairs, several
from tests.matrix_nets import BAD_STEP, ROUND, ByHand, awkward, by_hand, distance
from tests.pool import Pool

_REFUSED = re.compile(r"^lockstep\.[a-z.]+\.(?:UserError|NonFinite): (.*)$", re.MULTILINE)
_STOP = 2 * ROUND + ROUND  # after the first checkpoint, at the end of a round
# how far two runs may come apart, as a part of the way that the weights went
_ROUNDING = {"fp32": 1e-9, "bf16": 0.3, "fp16": 0.15}
_SENT = {"none": 0.0, "fp16": 0.05, "bf16": 0.15}
# refused by the machine, or by the data (no pixel is infinite), which a config has not seen
_LATER: tuple[set[Choice], ...] = (
    {("precision", "tf32")},
    {("data.augment", AXES["data.augment"][0]), ("bad", True)},
)
_SLOW = "no answer in"
_MEMORY = Path("/dev/shm")  # checkpoints wait for their disk


@dataclass
class Tally:
    """What came of the combinations."""

    held: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)  # combination -> sentence
    failed: dict[str, str] = field(default_factory=dict)
    slow: int = 0  # without an answer in time


@dataclass
class Ran:
    """What a run left."""

    weights: dict[str, Any]
    end: dict[str, Any]
    losses: list[float]


def tried(pool: Pool, combination: Combination, sizes: tuple[int, ...]) -> list[str]:
    """What does not hold of a combination on so many processes; raises UserError where it is refused."""
    config = combination.config()
    chosen = dict(combination.choices)
    stops = bool(chosen.get("bad")) and config.on_nonfinite == "stop"
    sizes = tuple(n for n in sizes if _fits(config, n)) or (1,)
    if stops:
        return [wrong for n in sizes for wrong in _stopped(pool, config, n)]
    runs = {n: _run(pool, config, n) for n in sizes}
    found = [f"N = {n}: {wrong}" for n, run in runs.items() for wrong in _against_hand(config, n, run)]
    found += _against_each_other(config, runs)
    n = sizes[-1]
    local = config.model.batch_norm == "local"
    then = n if local else sizes[0]
    resumed = _run(pool, config, n, then)
    apart = distance(resumed.weights, runs[n].weights)
    most = _tolerance(config) * _hand(config).moved
    if apart > most or resumed.end["ledger_sha256"] != runs[n].end["ledger_sha256"]:
        found.append(f"stopped on {n} and resumed on {then}: {apart:.2g} apart, at most {most:.2g} expected")
    return found


def _fits(config: Config, n: int) -> bool:
    """Whether so many processes may share the batch."""
    try:
        config.require_batch_for(n)
    except UserError:
        return False
    return True


def _stopped(pool: Pool, config: Config, n: int) -> Iterator[str]:
    """A bad batch ends the run by name, on the step it was in."""
    try:
        _run(pool, config, n)
    except UserError as error:
        if "non-finite" not in str(error):
            raise
        if f"non-finite at step {BAD_STEP + 1}" not in str(error):
            yield f"N = {n}: the bad batch came to: {error}"
    else:
        yield f"N = {n}: nobody noticed the bad batch"


def _against_hand(config: Config, n: int, run: Ran) -> Iterator[str]:
    """What a run should have come to."""
    if not all(value == value for value in run.losses):
        yield f"losses {run.losses}"
    if config.model.group or (config.exact and n > 1):
        return
    if config.model.batch_norm == "local" and n > 1:
        return  # DDP over local statistics: the law is given up
    hand = _hand(config)
    ours, theirs = run.weights, hand.weights
    if config.exact:  # its buffers move once a step
        ours, theirs = ({k: v for k, v in w.items() if "running" not in k} for w in (ours, theirs))
    apart, most = distance(ours, theirs), _tolerance(config, n) * hand.moved
    if apart > most:
        yield f"the loop by hand ended {apart:.2g} away, at most {most:.2g} expected (they went {hand.moved:.2g})"
    if config.on_nonfinite == "skip" and run.end["skipped"] != len(hand.left_out):
        yield f"{run.end['skipped']} step(s) skipped, by hand {len(hand.left_out)}"


def _against_each_other(config: Config, runs: dict[int, Ran]) -> Iterator[str]:
    """What N may not change."""
    first, *others = runs.items()
    for n, run in others:
        if run.end["ledger_sha256"] != first[1].end["ledger_sha256"]:
            yield f"the ledgers of N = {first[0]} and {n} differ"
        if config.exact and run.end["weights_sha256"] != first[1].end["weights_sha256"]:
            yield f"exact: N = {first[0]} and {n} end in other bits"
        free = config.model.batch_norm == "local"
        apart = 0.0 if free else distance(run.weights, first[1].weights)
        most = _tolerance(config, n) * _hand(config).moved
        if apart > most:
            yield f"N = {first[0]} and {n} end {apart:.2g} apart, at most {most:.2g} expected"


def _tolerance(config: Config, n: int = 2) -> float:
    sent = _SENT.get(config.comm.compress, 0.0) if n > 1 else 0.0
    return max(_ROUNDING[config.precision], sent)


_kept: dict[str, ByHand] = {}


def _hand(config: Config) -> ByHand:
    """The loop by hand, once for all configs that it can't tell apart."""
    seen = (
        config.precision, config.on_nonfinite != "stop", config.comm, config.optim,
        config.accumulate, config.exact, config.model.model, config.data, config.samples,
        config.model.channels_last, config.model.freeze,
    )  # fmt: skip
    key = repr(seen)
    if key not in _kept:
        _kept[key] = by_hand(config)
    return _kept[key]


def _run(pool: Pool, config: Config, n: int, resumed_on: int = 0) -> Ran:
    """`train` on n processes; with `resumed_on` it stops in the middle and goes on on so many."""
    parts = [(n, _STOP), (resumed_on, 0)] if resumed_on else [(n, 0)]
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        for size, stop in parts:
            try:
                pool.start(_train, config, folder, stop, execution=config.with_execution(nproc=size).execution)
            except WorkerFailed as failed:
                if sentence := _REFUSED.findall(str(failed)):
                    raise UserError(sentence[-1], "") from failed
                raise
        records: list[Any] = list(journals.read(Path(folder, "journal.jsonl")))
        losses = [record["loss"] for record in records if record["kind"] == "step"]
        return Ran(load_file(Path(folder, "weights", "final.safetensors")), records[-1], losses)


def _train(world: World, config: Config, folder: str, stop: int) -> None:
    """On each rank."""
    from lockstep.training.control import Agreement, Control
    from lockstep.training.loop import train
    from lockstep.training.run_folder import check

    agree = Control.agree

    def stopping(self: Control, steps: int, failed: bool = False, now: bool = False) -> Agreement:
        asked = agree(self, steps, failed, now)
        return Agreement(signal.SIGUSR1, True, asked.failed) if steps == stop else asked

    with (
        awkward(),
        mock.patch.object(Control, "agree", stopping),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        check(config)
        config.require_batch_for(world.size)
        train(config, world, Path(folder))


def tally_of(combinations: Iterable[Combination], seconds: float, say: Say = print) -> Tally:
    """Try them until the time is up."""
    tally, began = Tally(), time.monotonic()
    numbers = itertools.cycle([(1, 2), (1, 3), (2, 3)])
    with Pool(timeout=300) as pool:
        for combination in combinations:
            if time.monotonic() - began > seconds:
                break
            name, sizes = str(combination), next(numbers)
            if sentence := combination.refusal():
                tally.refused[name] = sentence.splitlines()[0]
                continue
            try:
                wrong = tried(pool, combination, sizes)
            except UserError as error:
                if any(choices <= set(combination.choices) for choices in _LATER):
                    tally.refused[name] = error.message.splitlines()[0]
                    continue
                wrong = [f"refused when it ran, and not by the config: {error.message}"]
            except Exception as error:
                if _SLOW in str(error):
                    tally.slow += 1
                    continue
                wrong = [f"{type(error).__name__}: ...{str(error).strip()[-1200:]}"]
            if wrong:
                tally.failed[name] = "; ".join(wrong)
                say(f"FAILED {name} on {sizes}: {tally.failed[name]}")
            else:
                tally.held[name] += 1
    return tally


def drawn(seed: int, triples: bool) -> Iterator[Combination]:
    """Pairs in random order, those last that compile, which takes as long as ten others; after each a random triple."""
    every = pairs()
    random.Random(seed).shuffle(every)
    every.sort(key=lambda pair: "model.compile" in str(pair))
    return itertools.chain.from_iterable(zip(every, several(seed, 3), strict=False)) if triples else iter(every)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pairs", default="some", help="all: in order; random: by the seed; some: random, and triples")
    parser.add_argument("--only", default="", help="combinations whose name holds this")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    all_of_them = given.pairs == "all" or given.only
    chosen: Iterable[Combination] = pairs() if all_of_them else drawn(given.seed, triples=given.pairs == "some")
    if given.only:
        chosen = [each for each in chosen if given.only in str(each)]
    tally = tally_of(chosen, given.seconds, lambda text: print(text, flush=True))
    print(f"{len(tally.held)} held, {len(tally.refused)} refused, {len(tally.failed)} failed, {tally.slow} too slow")
    for sentence, count in Counter(tally.refused.values()).most_common():
        print(f"  {count} x {sentence}")
    return bool(tally.failed)


if __name__ == "__main__":
    sys.exit(main())
