"""What `lockstep tune` prints."""

from rich.console import Console
from rich.table import Table

from lockstep.commands.tune.run import Tuned


def show(tuned: Tuned) -> None:
    """A table of all choices, and the command to type."""
    console, table = Console(highlight=False), Table(box=None)
    for title in ("", "choice", "images/s", "over as it is", "changes", ""):
        table.add_column(title, justify="right" if title in ("images/s", "over as it is") else "left")
    axis = ""
    for row in tuned.rows:
        middle, low, high = row.ratio
        ratio = "" if not row.changes else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        told = "taken" if row.taken else "" if row.same else "other results: left"
        table.add_row(
            row.axis if row.axis != axis else "", row.name, f"{row.images_per_s:,.0f}", ratio, row.changes, told
        )
        axis = row.axis
    if tuned.rows:
        console.print(table)
    for note in tuned.notes:
        console.print(note)
    console.print(f"\n{tuned.exactly}", soft_wrap=True)
    if tuned.quickest != tuned.exactly:
        console.print(f"or, with products of 8 bits (look at the accuracy):\n{tuned.quickest}", soft_wrap=True)
