"""Runs kept in an S3 store: moto's server, s3fs, and processes that are killed."""

import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import remote
from tests.checkpoint.test_remote import claimed_at_once
from tests.journals import read
from tests.subprocesses import Command, Completed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
URL = "s3://bucket/runs/one"
STARTED: list[Command] = []
SECRET = "sesame-open-0123456789"
PROGRAM = """
from lockstep.checkpoint import remote
remote.LEASE_S, remote.RENEW_S, remote._RETRY_S = 3.0, 0.3, 1.0
from lockstep.cli import main
main()
"""
TRAIN = (
    "train --model tests.parallel.test_exact:small_net --exact 4 --batch-size 30 --fraction 0.1 --epochs 12 "
    "--eval-every 4 --threads 1 --checkpoint-every 2steps --log-every 1"
)


class Faults:
    """An application in front of the server: `refuse(method, path)` answers 503, `hold` keeps a request waiting."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.refuse: Callable[[str, str], bool] = lambda method, path: False
        self.hold: Callable[[str, str], bool] = lambda method, path: False
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self.hold(method, path):
            self.held.set()
            self.go.wait(120)
        if self.refuse(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        return self.app(environ, start)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """A server with an empty bucket, and credentials in the environment."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *args: Any) -> None:
            pass

    app = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIA-TEST", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": f"token-{SECRET}",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    store().fs.mkdir("bucket")
    yield app
    app.go.set()
    for each in STARTED:
        if each.process.poll() is None:
            each.end(0.1)
    STARTED.clear()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/moto-api/reset", data=b"").close()
    server.shutdown()
    thread.join()
    server.server_close()


def store() -> Any:
    return remote.Store.at(URL)


def step_names() -> set[str]:
    return {name.split("/")[1] for name in store().sizes("checkpoints")}


def command(machine: Path, line: str) -> Command:
    """`lockstep LINE` on a machine with a home of its own, with short leases."""
    machine.mkdir(exist_ok=True)
    env = {"HOME": str(machine), "XDG_CACHE_HOME": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONWARNINGS": ""}
    STARTED.append(Command(sys.executable, "-c", PROGRAM, *line.split(), cwd=machine, env=env, warm=True))
    return STARTED[-1]


def ended(machine: Path, line: str, code: int = 0) -> Completed:
    found = command(machine, line).end(120)
    assert found.code == code, found.text
    assert not found.orphans
    return found


def local(machine: Path) -> Path:
    (journal,) = machine.rglob("one-*/journal.jsonl")
    return journal.parent


def last_of(folder: Path) -> dict[str, Any]:
    return read(folder / "journal.jsonl")[-1]


def test_killed_in_an_upload_and_gone_on_elsewhere_with_the_bits_of_a_run_that_was_not(
    faults: Faults, tmp_path: Path
) -> None:
    ended(tmp_path / "zero", f"{TRAIN} --nproc 1 --out whole")
    whole = last_of(tmp_path / "zero/whole")
    whole_ones: list[int] = []

    def newer(method: str, path: str) -> bool:
        """Whether this is a file of a checkpoint that is newer than those that are whole."""
        step = int(found[1]) if (found := re.search(r"/step-(\d+)/", path)) and method == "PUT" else 0
        if path.endswith("manifest.json") and step:
            whole_ones.append(step)
        return path.endswith("state.json") and bool(whole_ones) and step > max(whole_ones)

    faults.hold = newer
    first = command(tmp_path / "one", f"{TRAIN} --nproc 2 --out {URL}")
    first.until(faults.held.is_set)
    # the first one lives: a second one is refused, and nothing of it is left in the store
    refused = ended(tmp_path / "two", f"{TRAIN} --nproc 1 --out {URL}", code=2)
    assert f"{URL} is in use by another run: process " in refused.err
    assert "Wait until that has ended (3 s after it was killed), or name another place with --out" in refused.err
    first.signal_group(signal.SIGKILL)
    first.end()
    faults.hold = lambda method, path: False
    faults.go.set()
    torn, last = max(step_names()), f"step-{max(whole_ones):09d}"
    assert torn > last
    began = time.monotonic()
    second = ended(tmp_path / "three", f"{TRAIN} --nproc 1 --out {URL}")
    assert time.monotonic() - began > 3.0  # the lease of the one that was killed
    assert f"torn in {URL} and ignored: {torn}" in second.out
    assert f"fetched {last} from {URL}" in second.out
    assert f"resumed from step {max(whole_ones)} " in second.out
    end = last_of(local(tmp_path / "three"))
    assert end["status"] == "completed"
    assert (end["weights_sha256"], end["ledger_sha256"]) == (whole["weights_sha256"], whole["ledger_sha256"])
    names = store().sizes()
    assert not [name for name in names if name.startswith("owner/")]
    assert store().read("journal.jsonl") == (local(tmp_path / "three") / "journal.jsonl").read_bytes()
    # the machine that was killed comes back: its last steps were taken elsewhere
    again = ended(tmp_path / "one", f"{TRAIN} --nproc 2 --epochs 13 --override epochs --out {URL}")
    assert f"{URL} has gone on elsewhere" in again.out
    assert "resumed from step 60 " in again.out
    # from anywhere
    for line in ("eval {} --nproc 1 --trust-code", "report {} --out page.html", "export {} --to torch --trust-code"):
        ended(tmp_path / "four", line.format(URL))
    refused = ended(tmp_path / "four", f"watch {URL}", code=2)
    assert "is an address" in refused.err
    # no credential anywhere
    for path in tmp_path.rglob("*"):
        assert not (path.is_file() and SECRET.encode() in path.read_bytes()), path
    for name in store().sizes():
        assert SECRET.encode() not in store().read(name), name
    for each in (refused, second, again):
        assert SECRET not in each.out + each.err


def test_a_store_that_fails_for_a_while_for_ever_and_is_mended(faults: Faults, tmp_path: Path) -> None:
    count = {"left": 6}

    def for_a_while(method: str, path: str) -> bool:
        if method != "PUT" or "checkpoints/" not in path:
            return False
        count["left"] -= 1
        return count["left"] >= 0

    faults.refuse = for_a_while
    ended(tmp_path / "one", f"{TRAIN} --nproc 1 --out {URL}")
    assert count["left"] < 0
    assert "checkpoints/step-000000060/manifest.json" in store().sizes()
    faults.refuse = lambda method, path: method == "PUT" and "checkpoints/" in path
    more = f"{TRAIN} --nproc 1 --epochs 13 --override epochs --out {URL}"
    failed = ended(tmp_path / "one", more, code=2)
    folder = local(tmp_path / "one")
    assert f"what the run did last is in {folder} alone. {URL}: can't upload checkpoints/step-" in failed.err
    assert "Please reduce your request rate" in failed.err
    assert last_of(folder)["status"] == "completed"  # training went on
    assert not any("step-000000065" in name for name in store().sizes("checkpoints"))
    faults.refuse = lambda method, path: False
    ended(tmp_path / "one", more)
    assert "checkpoints/step-000000065/manifest.json" in store().sizes()


def test_of_many_who_claim_at_once_one_gets_it(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 10.0)  # on a busy machine a renewal may take seconds
    monkeypatch.setattr(remote, "RENEW_S", 0.3)
    claimed_at_once(URL, [])
    claimed_at_once(URL, ["dead"])


def test_no_server_no_bucket_and_no_right_are_said_before_anything_starts(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ended(tmp_path / "one", "train --nproc 2 --epochs 1 --out s3://nobucket/run", code=2)
    assert "s3://nobucket/run: can't list owner" in found.err
    assert "bucket does not exist" in found.err
    with monkeypatch.context() as nobody:
        nobody.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        found = ended(tmp_path / "one", f"train --nproc 1 --epochs 1 --out {URL}", code=2)
    assert f"{URL}: can't list owner" in found.err
    assert "AWS_ENDPOINT_URL" in found.err
    assert not list(tmp_path.rglob("journal.jsonl"))
