"""Findings about steps: batches and rates on N processes, accumulation, clipping, the model's wrapper and draws."""

from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import Finding, times
from lockstep.commands.audit.records import Reading, Record, of, trainings


def _pass(record: Record) -> Reading | None:
    return next((each for each in trainings(record.first) if of(each.events, "step")), None)


def _global_batch(record: Record) -> int:
    """Samples of one optimizer step, over all ranks, as the loader has it; 0 where that is not known."""
    reading = _pass(record)
    if reading is None:
        return 0
    size = max((each["size"] or 0 for each in reading.batches), default=0)
    if len(reading.batches) == 1 and reading.loader.get("batch_sampler") == "BatchSampler":
        size = reading.loader.get("batch_size") or size  # it would have been as large, of a larger set
    parts = of(reading.events, "backward", "step")
    taken = next((i for i, each in enumerate(parts) if each["event"] == "step"), 1)
    return int(size * taken * (record.world if reading.loader.get("replicas") or _differ(record) else 1))


def _differ(record: Record) -> bool:
    """Whether the ranks read different samples."""
    firsts = [next(iter(trainings(events)), None) for events in record.ranks.values()]
    return len({str(each.ids[:64]) for each in firsts if each}) > 1


def adjusted(records: list[Record]) -> Iterator[Finding]:
    """LS208: N times the batch at the same rate. LS209: the same batch at N times the rate."""
    one = next((each for each in records if each.world == 1), None)
    before, step = (_global_batch(one), next(iter(of(one.first, "step")), None)) if one else (0, None)
    if not before or step is None or not step["lr"] or not step["lr"][0]:
        return
    for record in records:
        batch, now = _global_batch(record), next(iter(of(record.first, "step")), None)
        if record.world == 1 or not batch or now is None or not now["lr"]:
            continue
        larger, faster = batch / before, now["lr"][0] / step["lr"][0]
        close = 1 + 0.75 * (record.world - 1)
        if larger >= close and abs(faster - 1) < 1e-6:
            says = (
                f"on {record.world} processes {larger:.1f} x fewer steps at the same rate: "
                f"{batch:,} samples a step instead of {before:,}, at {now['lr'][0]:g}"
            )
            yield Finding("LS208", now["at"], says, record.nproc)
        if abs(larger - 1) < 0.01 and faster >= close:
            says = (
                f"on {record.world} processes {faster:.1f} x the rate for the same {batch:,} samples a step: "
                f"{now['lr'][0]:g} instead of {step['lr'][0]:g}"
            )
            yield Finding("LS209", now["at"], says, record.nproc)


def schedulers(records: list[Record]) -> Iterator[Finding]:
    """LS210: a scheduler is stepped N times as often."""
    one = next((each for each in records if each.world == 1), None)
    for record in (each for each in records if each.world > 1):
        if one is None:
            return
        a, b = _steps_of_rate(one), _steps_of_rate(record)
        if a and b >= a * (1 + 0.75 * (record.world - 1)) and _same_steps(one, record):
            at = next(each["at"] for reading in trainings(record.first) for each in of(reading.events, "scheduler"))
            steps = f"the scheduler takes {b:g} steps for each of the optimizer's on {record.world} processes"
            yield Finding("LS210", at, f"{steps}, {a:g} on one", record.nproc)


def _steps_of_rate(record: Record) -> float:
    """Scheduler steps per optimizer step in the first training pass."""
    reading = _pass(record)
    steps = len(of(reading.events, "step")) if reading else 0
    return len(of(reading.events, "scheduler")) / steps if reading and steps else 0.0


def _same_steps(one: Record, other: Record) -> bool:
    a, b = _pass(one), _pass(other)
    return bool(a and b and len(of(a.events, "step")) == len(of(b.events, "step")))


def remainders(records: list[Record]) -> Iterator[Finding]:
    """LS202: the last passes of an epoch are followed by no step."""
    for record in records:
        for reading in (each for each in trainings(record.first) if each.whole):
            done = of(reading.events, "backward", "step")
            steps = [i for i, each in enumerate(done) if each["event"] == "step"]
            left = len(done) - 1 - steps[-1] if steps else 0
            after = _following(record.first, reading)
            if left and len(of(done, "backward")) >= 2 * len(steps) and after != "step":
                count = len(of(done, "backward"))
                says = f"the last {left} of {count} passes of epoch {reading.number + 1} made no update"
                yield Finding("LS202", done[steps[-1]]["at"], says, record.nproc)
                break


def _following(events: list[Event], reading: Reading) -> str:
    begin = next(i for i, each in enumerate(events) if each is reading.events[0])
    after = of(events[begin + len(reading.events) :], "step", "zero", "backward", "pass")
    return str(after[0]["event"]) if after else ""


def clipped(records: list[Record]) -> Iterator[Finding]:
    """LS207: gradients are clipped while the scaler's factor is on them."""
    for record in records:
        windows, wrong = list[Event](), list[Event]()
        count, factor = 0, 1.0
        for each in of(record.first, "clip", "unscale", "scaler-step", "step"):
            if each["event"] == "scaler-step" and each["enabled"]:
                count += 1
                kinds = [other["event"] for other in windows]
                if "clip" in kinds and "unscale" not in kinds:
                    wrong.append(next(other for other in windows if other["event"] == "clip"))
                    factor = max(factor, each["factor"])
            windows = [] if each["event"] in ("scaler-step", "step") else [*windows, each]
        if wrong:
            says = f"in {len(wrong)} of {times(count, 'step')} gradients were clipped at {factor:,.0f} times their size"
            yield Finding("LS207", wrong[0]["at"], says, record.nproc)


def undivided(records: list[Record]) -> Iterator[Finding]:
    """LS201: accumulated passes go backward from the whole loss."""
    for record in records:
        for reading in trainings(record.first)[:1]:
            done = of(reading.events, "backward", "step")
            groups = len(of(done, "step"))
            passes = [each for each in of(done, "backward") if each.get("loss") and each["scale"] is not None]
            if groups and len(passes) >= 2 * groups and len(passes) > 2:
                ratios = [each["scale"] / each["loss"] for each in passes]
                if all(abs(ratio - 1) < 1e-3 for ratio in ratios):
                    each = len(passes) // groups
                    says = (
                        f"{each} passes a step go backward from the whole loss: the gradient is {each} times too large"
                    )
                    yield Finding("LS201", passes[0]["at"], says, record.nproc)


def masks(records: list[Record]) -> Iterator[Finding]:
    """LS211: all ranks drew from generators in the same state."""
    for record in records:
        draws = [[each for each in of(events, "draw") if each["what"] == "forward"] for events in record.ranks.values()]
        for place in range(min(map(len, draws), default=0)):
            now = [each[place] for each in draws]
            alike = {kind for kind in ("torch", "cuda") if all(kind in each["drew"] for each in now)}
            if len(now) > 1 and any(len({each["states"][kind] for each in now}) == 1 for kind in alike):
                says = f"all {len(now)} ranks drew the same numbers in training pass {place + 1}: equal dropout masks"
                yield Finding("LS211", now[0]["at"], says, record.nproc)
                break


def unwrapped(records: list[Record]) -> Iterator[Finding]:
    """LS302: the model in the wrapper is trained, and not by the wrapper."""
    for record in records:
        events = record.first
        forwards = [each for reading in trainings(events) for each in of(reading.events, "forward") if each["grad"]]
        wraps = any(each["kind"] == "ddp" for each in of(events, "wrap"))
        if wraps and forwards and record.world > 1 and not any(each["wrapped"] for each in forwards):
            says = f"{times(len(forwards), 'training pass', 'training passes')} went past DDP{_apart(record)}"
            yield Finding("LS302", forwards[0]["at"], says, record.nproc)


def _apart(record: Record) -> str:
    """From which step on the ranks' weights differ."""
    steps = [of(events, "step") for events in record.ranks.values()]
    for place, now in enumerate(zip(*steps, strict=False)):
        if len({each.get("digest") for each in now}) > 1:
            return f", and the ranks' weights differ from step {place + 1} on"
    return ""
