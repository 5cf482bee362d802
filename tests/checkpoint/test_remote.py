"""A run kept in a store: whole or torn, never half; the newest good checkpoint found; one writer; no secrets."""

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.checkpoint import remote
from lockstep.checkpoint.format import MANIFEST, STATE
from lockstep.checkpoint.remote import Mirror, Store, StoreError, claim, claim_text, fetched, make_local
from lockstep.checkpoint.store import abandon, folder_name, list_checkpoints, prune
from lockstep.config import Execution
from lockstep.errors import UserError, redacted
from lockstep.training.resume import digests
from tests.checkpoint.moments import good, keep
from tests.inprocess import said

URL = "memory://bucket/run"
CHANGES = ("put_file", "pipe_file", "rm")  # of fsspec's, by which a store is changed


class Killed(BaseException):
    """The process ends here, as SIGKILL would have it."""


class Watched:
    """A file system of fsspec's whose changes are counted, and which one of them never comes back from."""

    def __init__(self, fs: Any, last: float = float("inf"), halfway: bool = False) -> None:
        self.fs, self.left, self.halfway, self.changes = fs, last, halfway, list[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.fs, name)
        return self.counted(name, value) if name in CHANGES else value

    def counted(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **how: Any) -> Any:
            self.left -= 1
            place = args[1] if name == "put_file" else args[0]
            if self.left < 0:
                if self.halfway and name == "put_file":  # as a store of files leaves it
                    content = Path(args[0]).read_bytes()
                    self.fs.pipe_file(place, content[: len(content) // 2])
                raise Killed
            self.changes.append(f"{name} {place.rpartition('run/')[2]}")
            return change(*args, **how)

        return changed


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    for name, value in {"_LOOK_S": 0.01, "LEASE_S": 0.2, "RENEW_S": 0.03}.items():
        monkeypatch.setattr(remote, name, value)
    monkeypatch.setattr("lockstep.data.remote._FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


Machine = Callable[[str], Path]


@pytest.fixture
def on_machine(_store: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Gives the run's local folder on a machine of a name, where we are from then on."""

    def local(name: str) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return make_local(URL)

    return local


@pytest.fixture
def here(on_machine: Machine) -> Path:
    return on_machine("one")


def note(folder: Path, text: str) -> None:
    """A line in the run's journal."""
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "of": text}) + "\n")


def checkpoint(folder: Path, step: int, value: int = 0) -> None:
    keep(folder / "checkpoints", step, value=value)
    note(folder, f"checkpoint {step}")


def uploaded(folder: Path, keep: int = 2) -> Mirror:
    """All that is in the folder, uploaded by a writer who then ends in order."""
    with Mirror(URL, folder, digests, keep) as mirror:
        pass
    return mirror


def steps(folder: Path) -> list[int]:
    return list(list_checkpoints(folder / "checkpoints"))


def found(folder: Path) -> tuple[int, Any]:
    """Step and value of the newest good checkpoint."""
    loaded = good(folder / "checkpoints")
    return loaded.step, loaded.state["value"]


def test_killed_at_any_change_the_store_has_the_old_or_the_new_and_another_machine_goes_on(
    here: Path, on_machine: Machine
) -> None:
    checkpoint(here, 10, value=1)
    uploaded(here)
    before = dict(Store.at(URL).fs.store)
    checkpoint(here, 20, value=2)
    prune(here / "checkpoints", 1)
    torn, done, last = 0, False, -1
    while not done:
        last += 1
        Store.at(URL).fs.store.clear()
        Store.at(URL).fs.store.update(before)
        writer = Mirror(URL, here)
        writer.store.fs = watched = Watched(writer.store.fs, last, halfway=last % 2 == 0)
        with suppress(Killed):
            writer.number = claim(writer.store, writer.me)
            writer.upload_new()
            done = True
        there = on_machine("two")
        shutil.rmtree(there)
        make_local(URL)
        (reader := Mirror(URL, there, digests)).fetch()
        manifest = f"pipe_file checkpoints/{folder_name(20)}/{MANIFEST}"
        assert found(there) == ((20, 2) if manifest in watched.changes else (10, 1)), watched.changes
        torn += any("torn" in line and folder_name(20) in line for line in reader.fetched)
    # files, the manifest, then what is old, then the journal
    names = [change.rpartition("/")[2] for change in watched.changes if "checkpoints" in change]
    assert names.index(MANIFEST) == max(names.index(STATE), 2) + 1
    assert f"rm checkpoints/{folder_name(10)}" in watched.changes
    assert watched.changes[-1] == "put_file journal.jsonl"
    assert torn >= 3


def test_what_is_damaged_in_the_store_is_named_and_the_one_before_is_taken_and_mended(
    here: Path, on_machine: Machine
) -> None:
    for step in (10, 20):
        checkpoint(here, step, value=step)
    uploaded(here)
    fs = Store.at(URL).fs
    whole = {path: fs.cat_file(path) for path in fs.find("/bucket/run/checkpoints")}
    for path, content in whole.items():
        if folder_name(20) not in path:
            continue
        for bad in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), content + b"x"):
            fs.pipe_file(path, bad)
            there = on_machine("two")
            with Mirror(URL, there, digests, 2) as mirror:
                named = [line for line in mirror.fetched if "damaged" in line and folder_name(20) in line]
                assert named, (path, mirror.fetched)
                assert found(there) == (10, 10)
                keep(there / "checkpoints", 20, value=20)  # it comes to that step again
            assert {each: fs.cat_file(each) for each in fs.find("/bucket/run/checkpoints")} == whole
            shutil.rmtree(there)
    fs.pipe_file(f"/bucket/run/checkpoints/{folder_name(20)}/stranger", b"x")
    with Mirror(URL, on_machine("three"), digests, 2) as mirror:
        assert "stranger" in "".join(mirror.fetched)


def test_names_that_lead_out_of_the_folder_are_not_fetched(here: Path, on_machine: Machine, tmp_path: Path) -> None:
    checkpoint(here, 10)
    uploaded(here)
    store = Store.at(URL).fs.store
    deeper = f"checkpoints/{folder_name(20)}/../../escaped"
    for name in ("../escaped.json", "weights/../../escaped.safetensors", deeper):
        store[f"/bucket/run/{name}"] = store["/bucket/run/journal.jsonl"]
    before = {path for path in tmp_path.rglob("*") if "two" not in path.parts}
    there = on_machine("two")
    with Mirror(URL, there, digests, 2):
        pass
    after = {path for path in tmp_path.rglob("*") if there not in path.parents and "two" not in path.parts}
    assert after == before
    assert not list(tmp_path.rglob("escaped*"))


def test_the_store_keeps_the_newest_and_the_best_and_nothing_of_a_course_that_was_left(
    here: Path, on_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "read_metadata", lambda path: {"step": "10"})

    def there() -> list[int]:
        return sorted({int(name.split("/")[1][5:]) for name in Store.at(URL).sizes("checkpoints")})

    for step in (10, 20, 30, 40):
        checkpoint(here, step)
        prune(here / "checkpoints", 2, best=10)
    uploaded(here)
    assert there() == [10, 30, 40]
    elsewhere = on_machine("two")  # which fetches the newest alone
    with Mirror(URL, elsewhere, digests, 2):
        assert steps(elsewhere) == [40]
        checkpoint(elsewhere, 50)
    assert there() == [10, 40, 50]
    with Mirror(URL, elsewhere, digests, 2):
        abandon(elsewhere / "checkpoints", 40)
    assert there() == [10, 40]


def test_a_machine_that_was_left_behind_fetches_and_one_that_is_ahead_does_not(here: Path, on_machine: Machine) -> None:
    checkpoint(here, 10, value=1)
    uploaded(here)
    checkpoint(here, 20, value=1)  # never uploaded: it was killed
    with Mirror(URL, here, digests, 2) as mirror:
        assert (mirror.fetched, found(here)) == ([], (20, 1))
    checkpoint(here, 30, value=1)  # neither, and then another machine goes on from 20
    there = on_machine("two")
    with Mirror(URL, there, digests, 2):
        assert found(there) == (20, 1)
        checkpoint(there, 25, value=2)
    here = on_machine("one")
    with Mirror(URL, here, digests, 2) as mirror:
        assert found(here) == (25, 2)
    assert steps(here) == [25]
    aside = here.with_name(f"{here.name}.older")
    assert any(str(aside) in line for line in mirror.fetched)
    assert (aside / "checkpoints" / folder_name(30)).is_dir()
    # what is damaged here is fetched
    (here / "checkpoints" / folder_name(25) / STATE).write_bytes(b"{}")
    with Mirror(URL, here, digests, 2):
        assert found(here) == (25, 2)
    # a store whose first journal never came has weights all the same
    (there / "weights" / "best.safetensors").write_bytes(b"weights")
    uploaded(there)
    Store.at(URL).remove("journal.jsonl")
    first = on_machine("new")
    Mirror(URL, first, digests).fetch()
    assert (found(first), (first / "weights" / "best.safetensors").read_bytes()) == ((25, 2), b"weights")
    assert not (first / "journal.jsonl").exists()
    # a reader gets the small files alone, and training on there gets the checkpoint too
    reader = on_machine("three")
    (there / "config.json").write_text("{}")
    uploaded(there)
    assert fetched(URL) == reader
    assert (steps(reader), (reader / "journal.jsonl").read_bytes()) == ([], (there / "journal.jsonl").read_bytes())
    with Mirror(URL, reader, digests, 2):
        assert found(reader) == (25, 2)
    with pytest.raises(UserError, match="memory://bucket/none holds no run"):
        fetched("memory://bucket/none")


def begin(url: str, owner: str, start: threading.Barrier, got: list[int], refused: list[str]) -> None:
    """Claim the store, and live for a while."""
    mine = Store.at(url)
    start.wait()
    try:
        number = claim(mine, owner)
    except UserError as error:
        refused.append(error.message)
        return
    got.append(number)
    for _ in range(40):
        mine.write(f"owner/{number:06d}.json", claim_text(owner))
        threading.Event().wait(0.02)


def claimed_at_once(url: str, before: list[str]) -> None:
    """Eight claim a store where some have claimed before, and died: one gets it, and the others name that."""
    store = Store.at(url)
    for number, owner in enumerate(before, 7):
        store.write(f"owner/{number:06d}.json", claim_text(owner))
    got, refused, start = list[int](), list[str](), threading.Barrier(8)
    threads = [threading.Thread(target=begin, args=(url, f"host{n}", start, got, refused)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1, (got, refused)
    assert len(refused) == 7
    assert all(f"{url} is in use by another run: process " in message for message in refused)
    store.remove("owner")


@pytest.mark.parametrize("before", [[], ["dead"]], ids=str)
def test_of_many_who_claim_at_once_one_gets_it(monkeypatch: pytest.MonkeyPatch, before: list[str]) -> None:
    monkeypatch.setattr(remote, "RENEW_S", 60.0)
    claimed_at_once(URL, before)


def test_who_claims_between_the_look_and_the_write_of_another_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Store.at(URL), Store.at(URL)
    write, alive = second.write, threading.Event()

    def overtaken(name: str, content: bytes, **mode: str) -> None:
        if not alive.is_set():
            assert claim(first, "first") == 1
            threading.Thread(target=renewing).start()
        write(name, content, **mode)

    def renewing() -> None:
        while not alive.wait(0.02):
            first.write("owner/000001.json", claim_text("first"))

    monkeypatch.setattr(second, "write", overtaken)
    try:
        with pytest.raises(UserError, match="is in use by another run"):
            claim(second, "second")
    finally:
        alive.set()
    assert b'"first"' in first.read("owner/000001.json")


def test_who_lost_the_claim_stops_uploading_and_says_so(here: Path) -> None:
    checkpoint(here, 10)
    with ExitStack() as stack:
        mirror = stack.enter_context(Mirror(URL, here, digests, 2))
        mirror.store.write("owner/000002.json", b'{"id": "x", "who": "process 1 on elsewhere"}')
        for _ in range(3000):
            if not mirror.failed:
                threading.Event().wait(0.01)
        assert mirror.failed
        checkpoint(here, 20)
        with pytest.raises(UserError, match="was taken over by process 1 on elsewhere"):
            stack.close()
    assert not any(folder_name(20) in name for name in mirror.store.sizes("checkpoints"))
    mirror.store.remove("owner")  # that run has ended
    with pytest.raises(UserError, match="was taken over by another run"):
        mirror.upload_new()


def test_a_store_that_fails_for_a_while_is_tried_again_and_one_that_fails_for_ever_ends_the_run_at_its_end(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(here, 10)
    failing = {"count": 3}
    put = Store.at(URL).fs.__class__.put_file

    def flaky(self: Any, *args: Any, **how: Any) -> Any:
        if failing["count"] > 0:
            failing["count"] -= 1
            raise OSError(16, "Please reduce your request rate to s3://key:secret@host?X-Amz-Signature=1")
        return put(self, *args, **how)

    monkeypatch.setattr(Store.at(URL).fs.__class__, "put_file", flaky)
    mirror = uploaded(here)
    (note,) = mirror.notes()
    assert "Please reduce" in note
    assert note.endswith("; try 4 of 6 follows, and goes well")
    assert "secret" not in note
    assert "Signature" not in note
    failing["count"] = 1_000_000
    checkpoint(here, 20)
    with pytest.raises(UserError) as caught, Mirror(URL, here, digests, 2) as mirror:
        pass
    assert f"what the run did last is in {here} alone. {URL}: can't upload checkpoints/" in caught.value.message
    assert "(6 tries)" in caught.value.message
    assert "the same command on this machine uploads what is missing" in caught.value.remedy
    assert any("will be tried again" in line for line in mirror.notes())
    failing["count"] = 0
    uploaded(here)
    assert any(name.endswith(f"{folder_name(20)}/{MANIFEST}") for name in Store.at(URL).sizes("checkpoints"))


SECRETS = (
    "s3://AKIA123:sesame@bucket/run", "s3://sesame@bucket/run", "https://host/run?X-Amz-Signature=sesame",
    "s3://bucket/run#sesame", "abfs://user:sesame@account/run", "simplecache::s3://sesame@bucket/run",
)  # fmt: skip


@pytest.mark.parametrize("url", SECRETS)
def test_an_address_with_a_secret_is_refused_and_neither_written_nor_said(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"holds a user, a password, a token"):
        Execution(out=url)
    for words in (f"train --out {url}", f"train --out={url}", f"eval {url}", f"train --data-dir {url}", url):
        assert "sesame" not in "".join(said(capsys, *words.split(), code=2))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    assert Execution(out="abfs://container@account/run").out == "abfs://container@account/run", "is no secret"
    assert redacted("see https://host/page for s3://bucket/run.") == "see https://host/page for s3://bucket/run."


def test_a_scheme_that_nothing_here_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="nope://x can't be reached"):
        Store.at("nope://x")
    with pytest.raises((UserError, StoreError), match="can't"):
        Store.at("http://127.0.0.1:9/x").write("a", b"")
    with pytest.raises(StoreError, match="can't list"):  # and not taken for a folder without files
        Store.at("http://127.0.0.1:9/x").sizes()
    monkeypatch.setattr("fsspec.core.url_to_fs", Mock(side_effect=OSError("Unable to load libjvm")))
    with pytest.raises(UserError, match="hdfs://x can't be reached: Unable to load libjvm"):
        Store.at("hdfs://x")
