"""Do torch, CUDA, the driver and NCCL agree, and does each device compute?"""

from collections.abc import Iterator

from lockstep.commands.doctor.children import Heard
from lockstep.commands.doctor.finding import Finding, fail, ok, skipped, warn
from lockstep.commands.doctor.machine import Machine

_INSTALL = "as pytorch.org/get-started says for your CUDA"
_LITTLE_GIB = 2.0


def unseen(heard: Heard, seconds: float) -> Finding:
    """The finding where looking at the machine failed or did not end."""
    if heard.error:
        return fail("torch", f"{heard.stage}: {heard.error}", "Install torch and Lockstep anew in a fresh environment.")
    remedy = (
        "A driver or device hangs: `nvidia-smi` and `dmesg | grep -i -e nvrm -e xid`; often only a restart of the "
        "machine helps. --device cpu leaves the devices alone."
    )
    return fail("devices", f"no answer in {seconds:g} s, {heard.stage}; {heard.state}".rstrip("; "), remedy)


def agreement(machine: Machine) -> Iterator[Finding]:
    """torch, CUDA and driver.

    A torch built for CUDA x.y runs with any driver that speaks CUDA x.0 or newer
    (docs.nvidia.com/deploy/cuda-compatibility, "Minor Version Compatibility").
    """
    build = f"torch {machine.torch}, built for {f'CUDA {machine.built}' if machine.built else 'no CUDA'}"
    spoken = f"driver {machine.driver or '?'} speaks CUDA up to {machine.speaks or '?'}"
    seen = f"{machine.nvidia} NVIDIA device(s)"
    if not machine.nvidia or machine.kind not in ("cpu", "cuda"):
        what = f"{machine.count} {machine.kind} device(s)" if machine.count else "no GPU in this machine"
        yield ok("torch", f"{build}; {what}")
    elif not machine.built:
        yield fail("torch", f"{seen}, and {build}", f"Install a torch with CUDA, {_INSTALL}; or use --device cpu.")
    elif not machine.speaks:
        remedy = "Install the NVIDIA driver; in a container start it with --gpus all (NVIDIA's container toolkit)."
        yield fail("driver", f"{seen}, {build}, and no driver library (libcuda.so.1)", remedy)
    elif int(machine.built.partition(".")[0]) > int(machine.speaks.partition(".")[0]):
        major = machine.speaks.partition(".")[0]
        remedy = f"A newer driver, or a torch built for CUDA {major}, {_INSTALL}."
        yield fail("driver", f"{build}; {spoken}", remedy, built=machine.built, speaks=machine.speaks)
    else:
        yield ok("driver", f"{build}; {spoken}", built=machine.built, speaks=machine.speaks)
    yield from _nccl(machine)


def _nccl(machine: Machine) -> Iterator[Finding]:
    if not machine.nvidia or not machine.nccl_built:
        return
    built, loaded = machine.nccl_built, machine.nccl_loaded or machine.nccl_built
    if _numbers(loaded)[0] != _numbers(built)[0] or _numbers(loaded) < _numbers(built):
        remedy = "Another NCCL comes first: unset LD_LIBRARY_PATH and LD_PRELOAD, or install torch anew."
        yield fail("NCCL version", f"torch was built with NCCL {built}, and loads {loaded}", remedy)
    elif loaded != built:
        remedy = "Well unless another machine loads another one: all ranks need the same."
        yield warn("NCCL version", f"torch was built with NCCL {built}, and loads {loaded}", remedy)
    else:
        yield ok("NCCL version", built)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def computing(machine: Machine, wanted: str) -> Iterator[Finding]:
    """Each device, through torch's accelerator API. `wanted`: what --device says."""
    if wanted == "cpu":
        yield skipped("devices", "--device cpu")
        return
    if not machine.count:
        if machine.nvidia and machine.built:
            why = f": {machine.error}" if machine.error else ""
            hidden = f" CUDA_VISIBLE_DEVICES is {machine.hidden!r}." if machine.hidden is not None else ""
            remedy = f"See `nvidia-smi`, the rights of /dev/nvidia*, and the finding on the driver.{hidden}"
            yield fail("devices", f"{machine.nvidia} NVIDIA device(s), and torch sees none{why}", remedy)
        elif wanted != "auto":
            yield fail("devices", f"--device {wanted}: torch finds no accelerator", "Use --device cpu, or auto.")
        else:
            yield skipped(
                "devices", f"no accelerator: the CPU computes{f' ({machine.error})' if machine.error else ''}"
            )
        return
    if wanted not in ("auto", machine.kind):
        yield fail("devices", f"--device {wanted}: torch finds {machine.kind}", f"Use --device {machine.kind}.")
    if machine.wrong:
        remedy = "Leave it out by CUDA_VISIBLE_DEVICES or --gpus; `nvidia-smi -q` and dmesg tell of broken memory."
        yield fail("devices", "; ".join(machine.wrong), remedy)
        return
    names = ", ".join(dict.fromkeys(machine.names))
    message = f"{machine.count} x {names}: each multiplies right"
    free = min(machine.free_gib, default=0.0)
    if 0 < free < _LITTLE_GIB:
        full = f"{machine.kind}:{machine.free_gib.index(free)}"
        remedy = "Others hold its memory (nvidia-smi shows who): end them, or use other devices by --gpus."
        yield warn("devices", f"{message}; {free:g} GiB free on {full}", remedy, free_gib=list(machine.free_gib))
        return
    yield ok("devices", f"{message}; {free:g} GiB free at least", free_gib=list(machine.free_gib))
