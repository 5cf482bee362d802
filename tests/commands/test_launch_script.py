"""What `lockstep launch-script` writes: run by a shell, read as JSON, parsed by the command itself."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.commands.launch_script import TARGETS, SlurmPlan, TorchrunPlan, kubernetes, slurm, torchrun
from lockstep.commands.shared.arguments import parse, planned
from lockstep.config import Config, OptimConfig
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError
from tests.inprocess import said

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=12)


def plan(target: str, *words: str, name: str = "digits") -> Any:
    cls, _ = TARGETS[target]
    free, made = parse(cls.of(recipe(name)), words)
    assert not free
    return made


def parsed(words: list[str]) -> Config:
    """What `lockstep train` makes of its words."""
    config: Config = planned("train", lambda config: config, words)
    return config


def bash(
    script: str, folder: Path, srun: str, shown: str = "PreemptTime=None", **variables: str
) -> tuple[int, Any, Any]:
    """Run a job file with an srun that does this: the exit code, srun's words, and what Slurm was asked to do.

    `shown`: what it has to say of the job.
    """
    doings = {
        "srun": srun,
        "scontrol": f'[ "$1" = show ] && echo "   PreemptEligibleTime=2026-11-21T10:15:23 {shown}"',
        "scancel": "kill -USR1 $(cat srun.pid)",
    }
    for name, doing in doings.items():
        words = f'printf "%s\\0" "$@" >>{name}.words; echo >>{name}.words'
        (folder / name).write_text(f"#!/bin/bash\necho $$ >{name}.pid; {words}\n{doing}\n")
        (folder / name).chmod(0o755)
        (folder / f"{name}.words").write_text("")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **variables}
    job = subprocess.Popen(["bash", "-c", script], env=env, cwd=folder, start_new_session=True)
    try:
        code = job.wait(20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # as Slurm ends what a job file has left behind
    said = {name: (folder / f"{name}.words").read_text().split("\0\n")[:-1] for name in doings}
    asked = [" ".join(call.split("\0")) for name in ("scancel", "scontrol") for call in said[name]]
    arguments = said["srun"][0].split("\0") if said["srun"] else []
    return code, arguments, [call for call in asked if not call.startswith("show")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_as_it_is_needs_no_flags(name: str) -> None:
    assert TARGETS["slurm"][0].of(recipe(name)).train_flags() == []


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(NAMES, st.sampled_from(["", "imgs", "--odd"]), st.integers(2, 99), st.booleans(), st.sampled_from(["", "3,5"]))
@example("a b'$(id)\"", "--odd", 3, True, "")
@example("a\n#SBATCH --wrap=id; touch x\n", "imgs", 3, True, "")
def test_the_shell_and_the_command_read_the_same_run(
    tmp_path_factory: Any, data: str, out: str, epochs: int, flip: bool, milestones: str
) -> None:
    config = recipe("digits")
    config = dataclasses.replace(
        config,
        epochs=epochs,
        data=dataclasses.replace(config.data, flip=flip),
        optim=dataclasses.replace(config.optim, milestones=tuple(map(float, filter(None, milestones.split(","))))),
        execution=dataclasses.replace(config.execution, data_dir=data, out=out),
    )
    folder = tmp_path_factory.mktemp("job")
    code, words, _ = bash(slurm(SlurmPlan.of(config)), folder, "exit 0")
    assert code == 0
    assert words[:3] == ["--cpus-per-task=1", "lockstep", "train"]
    expected = dataclasses.replace(config.execution, nproc=1, out=out or "runs/digits-77")
    assert parsed(words[3:]) == dataclasses.replace(config, execution=expected)
    text = torchrun(TorchrunPlan.of(config))
    words = shlex.split(text)
    expected = dataclasses.replace(config.execution, out=out or "runs/digits")
    assert parsed(words[words.index("train") + 1 :]) == dataclasses.replace(config, execution=expected)


def test_a_value_that_the_recipe_has_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    drops = OptimConfig(schedule="multistep", milestones=(1.0, 2.0))
    monkeypatch.setitem(RECIPES, "digits", lambda: Config(optim=drops))
    without = Config(optim=OptimConfig(schedule="constant"))
    flags = [word for words in SlurmPlan.of(without).train_flags() for word in words]
    assert parsed(["digits", *flags]) == without


ROOM = "PreemptTime=2026-11-21T10:15:29"  # what Slurm shows of a job that makes room for another
STAYS = "PreemptTime=None"


@pytest.mark.parametrize(
    ("code", "shown", "restarts", "requeued"),
    [
        *((138, STAYS, "", True), (138, STAYS, "1", True), (138, STAYS, "2", False)),
        *((code, STAYS, "", False) for code in (0, 1, 143)),
        *((143, ROOM, "", True), (138, ROOM, "", True), (0, ROOM, "", False), (1, ROOM, "", False)),
    ],
)
def test_a_job_queues_again_where_it_was_stopped_by_the_signal_or_makes_room(
    tmp_path: Path, code: int, shown: str, restarts: str, requeued: bool
) -> None:
    counted = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    ended, _, asked = bash(slurm(plan("slurm", "--requeues", "2")), tmp_path, f"exit {code}", shown, **counted)
    assert (ended, asked) == (code, ["requeue 77"] * requeued)


def test_the_signal_before_the_limit_reaches_the_run(tmp_path: Path) -> None:
    srun = "trap 'exit 138' USR1; kill -USR1 $PPID; for _ in {1..100}; do sleep 0.1; done"
    assert bash(slurm(plan("slurm")), tmp_path, srun)[::2] == (138, ["--signal=USR1 77", "requeue 77"])


def test_a_run_that_does_not_heed_the_signal_is_ended_and_goes_on(tmp_path: Path) -> None:
    srun = "trap '' USR1; kill -USR1 $PPID; until [ -s scontrol.words ]; do sleep 0.1; done; exit 137"
    script = slurm(plan("slurm", "--signal-before", "2"))
    assert "sleep 1 &&" in script
    assert bash(script, tmp_path, srun)[::2] == (137, ["--signal=USR1 77", "requeue 77"])


@pytest.mark.parametrize("code", [124, 137, 139])
def test_a_run_that_hung_or_was_killed_starts_again_in_the_same_job(tmp_path: Path, code: int) -> None:
    srun = f"[ $(wc -l <srun.words) -gt 2 ] || exit {code}"
    script = slurm(plan("slurm", "--max-restarts", "2"))
    assert bash(script, tmp_path, srun)[::2] == (0, [])
    assert (tmp_path / "srun.words").read_text().count("--out") == 3
    assert bash(script, tmp_path, f"exit {code}")[::2] == (code, [])
    assert (tmp_path / "srun.words").read_text().count("--out") == 3


def test_a_job_that_must_not_queue_again_does_not(tmp_path: Path) -> None:
    script = slurm(plan("slurm", "--requeues", "0", "--checkpoint-every", "0"))
    assert bash(script, tmp_path, "exit 138")[::2] == (138, [])
    assert "#SBATCH --no-requeue" in script


def options(*words: str) -> dict[str, str]:
    lines = [line for line in slurm(plan("slurm", *words)).splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.removeprefix("#SBATCH --").partition("=") for line in lines)}


def test_execution_goes_to_the_directives() -> None:
    found = options(
        "--nodes", "2", "--nproc", "4", "--threads", "3", "--time", "1-0", "--name", "mine", "--memory", "64Gi"
    )
    wanted = {"job-name": "mine", "nodes": "2", "ntasks-per-node": "4", "cpus-per-task": "3", "time": "1-0"}
    assert wanted.items() <= found.items()
    assert found["mem"] == "64G"
    assert found["signal"] == "B:USR1@120"
    assert {"requeue", "open-mode", "output"} <= set(found)
    assert not {"gpus-per-node", "time", "mem"} & set(options())
    found = options("--gpus-per-node", "2", "--workers", "5", "--sbatch", "partition=gpu,exclusive,constraint=a|b")
    wanted = {"gpus-per-node": "2", "ntasks-per-node": "2", "cpus-per-task": "6", "partition": "gpu"}
    assert wanted.items() <= found.items()
    assert (found["exclusive"], found["constraint"]) == ("", "a|b")
    for words, tasks in (("--nproc 1", "1"), ("--strategy fsdp", "4")):
        assert options("--gpus-per-node", "4", *words.split())["ntasks-per-node"] == tasks


def test_what_is_set_up_comes_before_the_run(tmp_path: Path) -> None:
    script = slurm(plan("slurm", "--setup", f"srun() {{ touch {tmp_path}/seen; }}"))
    assert bash(script, tmp_path, "exit 5")[0] == 0
    assert (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("slurm", ["--requeues", "-1"], "--requeues -1 is too small"),
        ("slurm", ["--signal-before", "0"], "--signal-before 0"),
        ("slurm", ["--checkpoint-every", "0"], "would begin again"),
        ("slurm", ["--gpus", "0,1"], "the scheduler chooses"),
        ("slurm", ["--nproc", "4", "--gpus-per-node", "2"], "one process per GPU"),
        ("slurm", ["--memory", "much"], "--memory much"),
        ("slurm", ["--cpus-per-task", "-1"], "too small"),
        ("slurm", ["--nnodes", "0"], "no machine"),
        ("slurm", ["--name", "My job"], "--name My job"),
        ("slurm", ["--nnodes", "20", "--nproc", "4"], "smaller than the 80 processes"),
        ("slurm", ["--master-addr", "x"], "unknown flag '--master-addr'"),
        ("slurm", ["--image", "x"], "unknown flag '--image'"),
        ("torchrun", ["--nnodes", "2"], "--master-addr, machine 0's address"),
        ("torchrun", ["--nnodes", "2", "--ip", "a", "--min-nnodes", "3"], "--min-nnodes 3"),
        ("torchrun", ["--master-port", "70000"], "not a port"),
        ("kubernetes", ["--epochs", "nine"], "--epochs nine"),
        ("slurm", ["--sbatch", "wrap=id\ntouch x"], "not one word"),
        ("slurm", ["--time", "30\n#SBATCH --wrap=id"], "not one word"),
    ],
)
def test_what_can_not_work_is_refused(target: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        plan(target, *words)
    assert message in str(refused.value)


def test_a_manifest_without_an_image_is_refused() -> None:
    with pytest.raises(UserError, match="needs an image"):
        kubernetes(plan("kubernetes"))


def test_torchrun_lines_differ_in_the_machine_alone() -> None:
    text = torchrun(plan("torchrun", "--nnodes", "3", "--master-addr", "a", "--nproc", "2", "--max-restarts", "7"))
    lines = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    assert [[w for w in line if w.startswith("--node-rank")] for line in lines] == [
        [f"--node-rank={i}"] for i in range(3)
    ]
    assert len({tuple(w for w in line if not w.startswith("--node-rank")) for line in lines}) == 1
    assert "--max-restarts=7" in lines[0]
    assert "--max-restarts" not in lines[0]
    named = torchrun(plan("torchrun", "--nnodes", "2", "--ip", "a", "--port", "4", "--name", "b"))
    assert "--master-port=4 " in named
    other = torchrun(plan("torchrun", "--nnodes", "2", "--ip", "a", "--name", "b"))
    assert other != torchrun(plan("torchrun", "--nnodes", "2", "--ip", "a", "--name", "c")).replace("c", "b")


def test_elastic_lines_have_one_host() -> None:
    text = torchrun(plan("torchrun", "--nnodes", "4", "--min-nnodes", "2", "--ip", "a", "--port", "5"))
    first, others = (line for line in text.splitlines() if not line.startswith("#"))
    assert "--nnodes=2:4 " in first
    assert "--rdzv-endpoint=a:5 --rdzv-conf=is_host=1" in first
    assert first.replace("is_host=1", "is_host=0") == others


def test_a_recipe_of_several_machines_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = dataclasses.replace(Config().execution, nnodes=2, master_addr="a", master_port=3)
    monkeypatch.setitem(RECIPES, "digits", lambda: Config(execution=execution))
    assert "--nnodes=2 --node-rank=0 --master-addr=a --master-port=3" in torchrun(plan("torchrun"))


def manifest(*words: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(kubernetes(plan("kubernetes", "--image", "me/it:1", *words)))
    return read


@settings(max_examples=25, deadline=None)
@given(st.text(min_size=1))
@example('x"\nkind: Pod\n#')
@example("- a: b # c")
def test_no_value_becomes_a_part_of_the_manifest(text: str) -> None:
    read = manifest(f"--image=image {text}", f"--data-dir=data {text}", f"--claim=claim {text}")
    stands_for = {f"{name} {text}": name for name in ("image", "claim")} | {f"data {text}".replace("$", "$$"): "data"}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else stands_for.get(value, value)

    assert plain(read) == manifest("--image=image", "--data-dir=data", "--claim=claim")


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
@example("$(id)")
@example("a\ntouch x")
def test_no_address_becomes_a_part_of_torchruns_line(text: str) -> None:
    for elastic in ([], ["--min-nnodes", "1"]):
        written = torchrun(plan("torchrun", "--nnodes", "2", f"--ip={text}", "--port", "5", *elastic))
        first = written.removeprefix("# on machine 0\n").partition("\n# on ")[0]
        assert shlex.split(first)[0] == "torchrun"
        assert any(text in word for word in shlex.split(first))
        assert shlex.split(first)[-3:] == ["digits", "--out", "runs/digits"]


def test_a_pytorchjob_has_a_master_and_the_rest_as_workers() -> None:
    spec = manifest("--nnodes", "3", "--gpus-per-node", "2", "--max-restarts", "5")["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert {role: group["replicas"] for role, group in replicas.items()} == {"Master": 1, "Worker": 2}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert spec["nprocPerNode"] == "2"
    assert spec["runPolicy"]["backoffLimit"] == 15
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert list(manifest()["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_memory_run_folder_and_data_are_mounted() -> None:
    spec = manifest("--claim", "ours", "--grace-period", "7", "--memory", "64Gi")["spec"]
    pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    command, resources = (pod["containers"][0][name] for name in ("command", "resources"))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    at = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert at["/lockstep"]["persistentVolumeClaim"] == {"claimName": "ours"}
    assert at["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert pod["terminationGracePeriodSeconds"] == 7
    assert resources == {"requests": {"cpu": "1", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}
    config = parsed(command[command.index("train") + 1 :])
    assert (config.execution.out, config.execution.data_dir) == ("/lockstep/runs/digits", "/lockstep/data")


def test_kubernetes_leaves_dollars_alone() -> None:
    command = manifest("--out", "a$(HOME)$$b")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"][
        "containers"
    ]
    assert "a$$(HOME)$$$$b" in command[0]["command"]


def test_the_command_writes_a_file_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, executable in (("slurm", True), ("torchrun", False)):
        file = tmp_path / target
        printed, silent = (
            said(capsys, "launch-script", target, "mnist", "--epochs", 3, *words)[0] for words in ((), ("--file", file))
        )
        assert (printed, silent) == (file.read_text(), "")
        assert "train mnist" in file.read_text()
        assert os.access(file, os.X_OK) == executable


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slrum"], "Did you mean slurm?"),
        (["slurm", "mnst"], "unknown recipe 'mnst'"),
        (["slurm", "--file", "/nowhere/job.sh"], "/nowhere/job.sh can't be written"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, "launch-script", *words, code=2)[1]


@given(st.text(min_size=1))
@example("9_my.recipes:" + "a" * 60)
@example("my_package.recipes:_ours_")
@settings(deadline=None)
def test_a_recipe_lends_the_job_a_name_that_schedulers_take(name: str) -> None:
    config = dataclasses.replace(recipe("digits"), recipe=name)
    try:
        job = SlurmPlan.of(config).job
    except UserError as error:
        assert not any(letter in name.lower() for letter in "abcdefghijklmnopqrstuvwxyz"), error  # noqa: PT017
    else:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job)  # Kubernetes' own rule
        assert len(job) <= 52


def test_the_page_shows_what_is_written() -> None:
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("lockstep launch-script")]
    assert [command[0] for command in commands] == list(TARGETS)
    for target, name, *flags in commands:
        text = TARGETS[target][1](plan(target, *flags, name=name))
        assert target == "kubernetes" or f"```\n{text}```\n" in page
