"""What four number formats can hold: their bits, their range, and what becomes of some numbers.

python examples/concepts/formats.py
"""

import torch


def tf32(value: float) -> float:
    """As a GPU's matrix unit reads a float32 in tf32: 10 bits of mantissa, rounded to the nearest."""
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32)
    return float(((bits + 0x1000) & ~0x1FFF).view(torch.float32))


def rounded(name: str, value: float) -> float:
    """A value as the format holds it."""
    return tf32(value) if name == "tf32" else float(torch.tensor(value, dtype=getattr(torch, name)))


if __name__ == "__main__":
    print("         exponent  mantissa  largest  least  1/3         1.002    1e-8    70000")
    for name, exponent, mantissa in (("float32", 8, 23), ("tf32", 8, 10), ("float16", 5, 10), ("bfloat16", 8, 7)):
        bias = 2 ** (exponent - 1) - 1
        largest, least = (2 - 2.0**-mantissa) * 2.0**bias, 2.0 ** (1 - bias)  # the least with all its bits
        third, near, small, big = (rounded(name, value) for value in (1 / 3, 1.002, 1e-8, 70000.0))
        print(f"{name:<9}{exponent:>8}{mantissa:>10}  {largest:.1e}  {least:.0e}  ", end="")
        print(f"{third:<12.8f}{near:<9.6g}{small:<8.3g}{big:g}")
