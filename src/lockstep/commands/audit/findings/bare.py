"""What happens under torchrun to a script that takes its local rank from the command line."""

from collections.abc import Iterator

from lockstep.commands.audit.findings import devices
from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, of


def launched(records: list[Record], others: list[Record]) -> Iterator[Finding]:
    """LS304: without the argument, which torchrun doesn't give, ranks fail or share a GPU."""
    del records
    for record in (each for each in others if each.way == "bare"):
        ends = [(rank, each) for rank, events in record.ranks.items() for each in of(events, "end")]
        failed = next(((rank, each) for rank, each in ends if each["how"] != "done"), None)
        shared = next((each for each in devices.shared([record]) if each.code == "LS303"), None)
        if shared is not None:
            yield Finding("LS304", shared.at, f"started as by torchrun, without it: {shared.says}", record.nproc)
        elif record.ended == "failed" and failed is not None:
            rank, end = failed
            error = str(end.get("error") or f"exit code {end.get('code')}").partition("\n")[0]
            says = f"started as by torchrun, without it, rank {rank} fails with {error}"
            yield Finding("LS304", end["at"], says, record.nproc)
