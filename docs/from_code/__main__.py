"""`python -m docs.from_code PART [zh]` prints a generated part of the reference as Markdown."""

import sys

from docs.from_code.parts import PARTS

if __name__ == "__main__":
    part, *language = sys.argv[1:] or ["commands"]
    if part not in PARTS:
        sys.exit(f"unknown part {part}; known: {', '.join(PARTS)}")
    print(PARTS[part](*language), end="")
