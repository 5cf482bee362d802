"""Findings about what each step and each accumulated pass waits for."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, of, trainings

_MOST = 0.9  # of the steps: "each"


def each_step(records: list[Record]) -> Iterator[Finding]:
    """LS309: a barrier in each step. LS310: each step reads a value back."""
    for record in records:
        for reading in trainings(record.first):
            steps = len(of(reading.events, "step"))
            if steps < 3:
                continue
            barriers = [each for each in of(reading.events, "collective") if "barrier" in each["op"]]
            if len(barriers) >= _MOST * steps and record.world > 1:
                says = f"{times(len(barriers), 'barrier')} in {times(steps, 'step')}"
                yield Finding("LS309", barriers[0]["at"], says, record.nproc)
            lines: dict[str, list[Event]] = {}
            for each in of(reading.events, "sync"):
                lines.setdefault(each["at"], []).append(each)
            for at, found in lines.items():
                if len(found) >= _MOST * len(reading.batches):
                    kinds = " and ".join(sorted({each["kind"] for each in found}))
                    says = (
                        f"the host waits for the device {times(len(found), 'time')} in {times(steps, 'step')}: {kinds}"
                    )
                    yield Finding("LS310", at, says, record.nproc)


def accumulated(records: list[Record]) -> Iterator[Finding]:
    """LS311: accumulated passes all all-reduce. LS312: no_sync leaves out the forward pass."""
    for record in records:
        if record.world < 2:
            continue
        for reading in trainings(record.first)[:1]:
            done = of(reading.events, "forward", "backward", "step")
            backwards, steps = of(done, "backward"), len(of(done, "step"))
            wrapped = any(each["wrapped"] for each in of(done, "forward"))
            if not wrapped or not steps:
                continue
            if len(backwards) >= 2 * steps and all(each["sync"] for each in backwards) and len(backwards) > 2:
                says = f"{times(len(backwards), 'pass', 'passes')} all-reduced gradients for {times(steps, 'step')}"
                yield Finding("LS311", backwards[0]["at"], says, record.nproc)
            late = [
                after
                for before, after in itertools.pairwise(done)
                if (before["event"], after["event"]) == ("forward", "backward")
                and before["wrapped"]
                and before["sync"]
                and not after["sync"]
            ]
            if late:
                says = (
                    f"{len(late)} of {len(backwards)} backward passes stand in no_sync and their forward passes don't"
                )
                yield Finding("LS312", late[0]["at"], says, record.nproc)
