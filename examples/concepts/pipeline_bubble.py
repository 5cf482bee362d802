"""How long the stages of a pipeline stand idle, by playing the schedule, beside the formula (K - 1) / (m + K - 1).

python examples/concepts/pipeline_bubble.py
"""

Op = tuple[str, int]  # ("F" or "B", micro-batch)


def gpipe(_stage: int, _stages: int, batches: int) -> list[Op]:
    """All forward passes, then all backward ones."""
    return [("F", m) for m in range(batches)] + [("B", m) for m in range(batches)]


def one_forward_one_backward(stage: int, stages: int, batches: int) -> list[Op]:
    """As many forward passes as it takes until the first gradient is back, then one of each in turns."""
    ahead = min(stages - stage, batches)
    order: list[Op] = [("F", m) for m in range(ahead)]
    for m in range(batches):
        order.append(("B", m))
        if ahead + m < batches:
            order.append(("F", ahead + m))
    return order


Ends = dict[tuple[int, Op], int]  # (stage, operation) -> when it is done


def play(orders: list[list[Op]]) -> tuple[float, int, Ends]:
    """Every operation takes one unit; returns idle share of all stages' time, micro-batches held at most, all ends."""
    ends: Ends = {}
    free, done, stages = [0] * len(orders), [0] * len(orders), len(orders)
    while any(count < len(order) for count, order in zip(done, orders, strict=True)):
        for stage, order in enumerate(orders):
            if done[stage] == len(order):
                continue
            kind, m = order[done[stage]]
            before = (stage - 1, ("F", m)) if kind == "F" else (stage + 1, ("B", m))
            needs_nothing = (kind == "F" and stage == 0) or (kind == "B" and stage == stages - 1)
            if needs_nothing or before in ends:
                free[stage] = max(free[stage], 0 if needs_nothing else ends[before]) + 1
                ends[stage, (kind, m)] = free[stage]
                done[stage] += 1
    busy, held = sum(map(len, orders)), 0
    for order in orders:
        live = [sum(1 if kind == "F" else -1 for kind, _ in order[: i + 1]) for i in range(len(order))]
        held = max(held, *live)
    return 1 - busy / (stages * max(free)), held, ends


if __name__ == "__main__":
    print("stages  micro-batches  formula   GPipe idle, held   1F1B idle, held")
    for stages, batches in ((4, 1), (4, 4), (4, 8), (4, 32), (8, 32)):
        formula = (stages - 1) / (batches + stages - 1)
        found = [
            play([schedule(stage, stages, batches) for stage in range(stages)])
            for schedule in (gpipe, one_forward_one_backward)
        ]
        columns = "".join(f"{idle:>12.1%}{held:>6}" for idle, held, _ in found)
        print(f"{stages:>6}{batches:>15}{formula:>9.1%}{columns}")
