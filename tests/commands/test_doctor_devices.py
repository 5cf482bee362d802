"""torch, CUDA, driver and NCCL in agreement: versions stand in for machines that are not at hand."""

from collections.abc import Iterable

import pytest

from lockstep.commands.doctor import children, devices
from lockstep.commands.doctor.children import Child
from lockstep.commands.doctor.devices import Machine
from lockstep.commands.doctor.finding import Finding

GPU = {
    "torch": "2.12.0", "cuda": "12.8", "kind": "cuda", "backend": "nccl", "count": 2, "names": ["H200", "H200"],
    "free_gib": [139.0, 138.0], "nvidia": 2, "driver": "570.86.15", "driver_cuda": "12.8", "nccl_built": "2.27.5",
    "nccl_loaded": "2.27.5",
}  # fmt: skip


def having(**changed: object) -> Machine:
    return Machine(**{**GPU, **changed})  # type: ignore[arg-type]


def of(found: Iterable[Finding], check: str) -> Finding:
    (one,) = [each for each in found if each.check == check]
    return one


def test_a_machine_in_order() -> None:
    found = [*devices.agreement(having()), *devices.computing(having(), "auto")]
    assert [(each.check, each.status) for each in found] == [
        ("driver", "ok"),
        ("NCCL version", "ok"),
        ("devices", "ok"),
    ]
    assert "2 x H200" in found[-1].message


@pytest.mark.parametrize(("built", "newest", "status"), [
    ("12.8", "12.4", "ok"), ("12.8", "13.0", "ok"), ("13.0", "12.8", "fail"), ("12.1", "11.8", "fail"),
])  # fmt: skip
def test_a_driver_too_old(built: str, newest: str, status: str) -> None:
    found = of(devices.agreement(having(cuda=built, driver_cuda=newest)), "driver")
    assert found.status == status
    assert f"built for CUDA {built}" in found.message
    assert status == "ok" or f"built for CUDA {newest.split('.')[0]}," in found.remedy


def test_a_torch_without_cuda_beside_a_gpu() -> None:
    bare = having(cuda="", kind="cpu", count=0, nccl_built="")
    found = of(devices.agreement(bare), "torch")
    assert found.status == "fail"
    assert "2 NVIDIA device(s), and torch 2.12.0, built for no CUDA" in found.message
    assert of(devices.computing(bare, "auto"), "devices").status == "skipped"


def test_a_driver_without_its_library() -> None:
    found = of(devices.agreement(having(driver_cuda="", kind="cpu", count=0)), "driver")
    assert found.status == "fail"
    assert "--gpus all" in found.remedy


def test_hidden_devices() -> None:
    blind = having(kind="cpu", count=0, hidden="", error="No CUDA GPUs are available")
    found = of(devices.computing(blind, "auto"), "devices")
    assert found.status == "fail"
    assert "torch sees none: No CUDA GPUs are available" in found.message
    assert "CUDA_VISIBLE_DEVICES is ''" in found.remedy


@pytest.mark.parametrize(
    ("loaded", "status"), [("2.27.5", "ok"), ("2.28.0", "warn"), ("2.20.5", "fail"), ("3.0.0", "fail")]
)
def test_another_nccl(loaded: str, status: str) -> None:
    found = of(devices.agreement(having(nccl_loaded=loaded)), "NCCL version")
    assert found.status == status
    assert status == "ok" or found.message == f"torch was built with NCCL 2.27.5, and loads {loaded}"


def test_a_device_that_computes_wrong_or_is_full() -> None:
    broken = having(wrong=["cuda:1: a product of matrices is wrong"])
    assert of(devices.computing(broken, "auto"), "devices").status == "fail"
    full = of(devices.computing(having(free_gib=[139.0, 0.5]), "auto"), "devices")
    assert full.status == "warn"
    assert "0.5 GiB free on cuda:1" in full.message


def test_another_kind_of_device_than_wanted() -> None:
    assert of(devices.computing(Machine("2.12.0"), "cuda"), "devices").status == "fail"
    assert [each.status for each in devices.computing(having(), "xpu")] == ["fail", "ok"]
    assert of(devices.computing(having(), "cpu"), "devices").status == "skipped"
    other = Machine("2.12.0", kind="mps", backend="gloo", count=1, names=["mps"])
    assert of(devices.agreement(other), "torch").status == "ok"


def test_this_machine() -> None:
    (child,) = children.run([(devices.look, "cpu")], 60.0)
    assert child.well, child
    found = child.value
    assert isinstance(found, Machine)
    assert found.versions["torch"].split("+")[0] == found.torch.split("+")[0]
    assert not found.count  # --device cpu leaves devices alone
    devices.compute("cpu")
    with pytest.raises(NotImplementedError):
        devices.compute("meta")  # a device without data


def test_a_driver_that_does_not_answer() -> None:
    silent = Child(
        4, stage="looking for devices through torch", state="waiting for a disk or a driver, uninterruptibly"
    )
    found = devices.unseen(silent, 20.0)
    assert found.status == "fail"
    assert found.message.startswith("no answer in 20 s, looking for devices through torch, waiting for a disk or a dr")
    broken = devices.unseen(Child(4, stage="importing torch", error="ImportError: libc10.so"), 20.0)
    assert broken.message == "importing torch: ImportError: libc10.so"


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    (child,) = children.run([(devices.look, "auto")], 120.0)
    assert child.well, child
    found = child.value
    assert found.kind == "cuda"
    assert all(each.status != "fail" for each in [*devices.agreement(found), *devices.computing(found, "auto")])
