"""Two equally quick programs on a machine that slows down: one after the other, and by turns.

    python examples/why/drift.py

Times are drawn, so that the truth is known: a speed-up of 1. A run takes 10 s, 2 % more or less, and the machine gets
slower by 1 % with each run, as it warms up or others begin to work.
"""

import numpy as np

RUNS, SPREAD, DRIFT = 6, 0.02, 0.01


def interval(ratios: np.ndarray, draw: np.random.Generator) -> tuple[float, float, float]:
    """Median, and its 95 % bootstrap interval."""
    medians = np.median(draw.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def estimates(by_turns: bool, draw: np.random.Generator) -> tuple[float, float, float]:
    """Speed-up of B over A with its interval, from RUNS runs of each."""
    seconds = 10 * (1 + DRIFT) ** np.arange(2 * RUNS) * (1 + SPREAD * draw.standard_normal(2 * RUNS))
    if by_turns:  # A B, B A, A B, ...
        rounds = seconds.reshape(RUNS, 2).copy()
        rounds[1::2] = rounds[1::2, ::-1]
        a, b = rounds.T
    else:
        a, b = seconds[:RUNS], seconds[RUNS:]
    return interval(a / b, draw)


def main() -> None:
    for name, by_turns in (("one after the other", False), ("by turns", True)):
        draw = np.random.default_rng(0)
        found = np.array([estimates(by_turns, draw) for _ in range(500)])
        holds = np.mean((found[:, 1] <= 1) & (found[:, 2] >= 1))
        print(
            f"{name:<20} speed-up {np.median(found[:, 0]):.3f}; the interval holds 1 in {holds:.0%} of 500 comparisons"
        )


if __name__ == "__main__":
    main()
