"""A model's weights as one sealed safetensors file, their digest, and the card that says how to use them."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from lockstep.checkpoint.format import Damaged, read_tensors, safetensors_chunks, tensor_bytes
from lockstep.config import Config, Precision, Tta
from lockstep.data.image_sets import ImageSet
from lockstep.distributed.files import whole_file
from lockstep.errors import UserError, reason
from lockstep.monitoring.journal import require_plain
from lockstep.parallel.fsdp import whole
from lockstep.parallel.strategy import unwrap

_SHOWN = 8  # entries that a mismatch lists
_SEAL = "lockstep_sha256"  # of tensors and metadata, in the metadata: safetensors itself would not see a changed bit
NAME_A_FILE, _AGAIN = "Name a file that holds weights.", "Copy or export the file again."
# what DDP, DataParallel, torch.compile, FSDP and checkpointing of activations put into names
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_NORM = re.compile(r"\b(\w+)_([gv])$")  # weight norm's, before torch 2.0


def digest(model: nn.Module) -> str:
    """SHA-256, in hex, of the elements of the unwrapped model's state_dict, in its own order; of any memory format.

    Every tensor comes to the CPU for it. All ranks call it together where the model is sharded.
    """
    sha = hashlib.sha256()
    for tensor in state_tensors(model).values():
        sha.update(tensor_bytes(whole(tensor).detach().cpu()).numpy().data)
    return sha.hexdigest()


def save(model: nn.Module, path: str | Path, metadata: dict[str, str], here: bool = True) -> None:
    """Write the unwrapped model's state_dict. The file appears whole or not at all, also when the machine dies.

    Tied weights are written once per name. `here`: on this rank; where the model is sharded the others call it too,
    and contribute their shards. Raises UserError where the file can't be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in state_tensors(model).items():
        gathered = whole(tensor)  # one at a time: together they may not fit on the device
        if here:
            tensors[name] = gathered.detach().cpu()
    if not here:
        return
    with whole_file(Path(path)) as temporary:
        write_sealed(tensors, temporary, metadata)


def write_sealed(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors on the CPU with metadata and a digest of both; equal ones make equal files. Raises OSError."""
    metadata = {name: value for name, value in metadata.items() if name != _SEAL}
    with path.open("wb") as file:
        file.writelines(safetensors_chunks(tensors, metadata | {_SEAL: _seal(tensors, metadata)}))


def _seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256, in hex, of names, dtypes, shapes and elements of tensors on the CPU, and of the metadata."""
    shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    rest = sorted((name, value) for name, value in metadata.items() if name != _SEAL)
    sha = hashlib.sha256(json.dumps([shapes, rest]).encode())
    for _, tensor in sorted(tensors.items()):
        sha.update(tensor_bytes(tensor).numpy().data)
    return sha.hexdigest()


def load(model: nn.Module, path: str | Path) -> None:
    """Copy a file that `save` wrote into the model. Raises UserError, and changes nothing, where it doesn't fit."""
    load_tensors(model, read(path, ours=True), str(path))


def read(path: str | Path, ours: bool = False) -> dict[str, Tensor]:
    """The tensors of a safetensors file, compared with the digest in its metadata; `ours`: it must have one.

    Raises UserError for a missing or damaged file.
    """
    require_there(path)
    require_plain(Path(path), NAME_A_FILE)
    with _damage_named(path):
        tensors, metadata = read_tensors(Path(path))
        if (ours or _SEAL in metadata) and metadata.get(_SEAL) != _seal(tensors, metadata):
            raise Damaged("its contents are not those that it was written with")
    return tensors


def require_there(path: str | Path) -> None:
    """Raise UserError where there is no such file."""
    if not Path(path).exists():
        raise UserError(f"no weights at {path}", "Name a run that has evaluated, or a file of weights.")


@contextmanager
def _damage_named(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, Damaged) as error:
        remedy = "Take another checkpoint, or export or download the file again, as safetensors or onnx."
        raise UserError(f"{path} is damaged or not a safetensors file: {reason(error)}", remedy) from error


def read_metadata(path: str | Path) -> dict[str, str]:
    """What `save` wrote beside the weights; nothing for a file that can't be read."""
    try:
        return read_tensors(Path(path))[1] if Path(path).is_file() else {}
    except (OSError, Damaged):
        return {}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into the model, on its own device. Raises UserError, which names `source`, for other names or shapes
    than the model's, and for numbers that are not finite; nothing is changed then.
    """
    floats = {name: t.float() if t.itemsize == 1 else t for name, t in tensors.items() if t.is_floating_point()}
    if broken := [name for name, t in floats.items() if not bool(torch.isfinite(t).all())]:
        raise UserError(f"{source} holds weights that are not finite: {listed(broken)}", "Take an earlier file.")
    own = state_tensors(model)
    # old files don't have batch norm's count of batches, and torch takes it to be 0
    counts = {name: torch.zeros_like(t) for name, t in own.items() if name.endswith("num_batches_tracked")}
    found = counts | under_own_names(tensors, own)
    if lines := diff_tensors(found, own, exact=False):
        name, remedy = type(unwrap(model)).__name__, "Build the model that wrote it."
        raise UserError(f"{source} does not fit {name} (file -> model): {listed(lines)}", remedy)
    copy_into(model, found)


def diff_tensors(found: Mapping[str, Tensor], own: Mapping[str, Tensor], exact: bool = True) -> list[str]:
    """A line for each name, shape or dtype that is not the same; unless `exact` all floating-point dtypes are alike."""

    def described(tensor: Tensor | None) -> str:
        if tensor is None:
            return "(none)"
        alike = not exact and tensor.is_floating_point()
        return f"{list(tensor.shape)} {'float' if alike else str(tensor.dtype).removeprefix('torch.')}"

    pairs = ((name, described(found.get(name)), described(own.get(name))) for name in dict.fromkeys([*found, *own]))
    return [f"{name} {before} -> {now}" for name, before, now in pairs if before != now]


def copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy all entries into the model, as written by its own version: some modules ask, and a file does not say."""
    state = state_tensors(model)  # beside its entries torch notes the modules' versions
    state.update(tensors)
    unwrap(model).load_state_dict(state)


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The unwrapped model's state_dict, detached. Raises UserError where an entry is no tensor."""
    state = unwrap(model).state_dict()
    if strange := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        remedy = "Only tensors are saved: register them as buffers."
        raise UserError(f"the model's state has entries that are not tensors: {listed(strange)}", remedy)
    return state


def under_own_names(found: Mapping[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Tensors without what a wrapper (DDP, torch.compile, an average) or an attribute (Lightning's `model.`) put into
    their names; weight norm's by torch's new ones. What stands beside those of the attribute is left out.

    They stay as they are where the model's own names are among them, and where two would get one name. Raises UserError
    where several attributes hold all of the model's names.
    """
    needed = [name for name in own if not name.endswith("num_batches_tracked")]
    found = {name: tensor for name, tensor in found.items() if name != "n_averaged" or name in own}  # AveragedModel's
    bare = {_WRAPPERS.sub("", name): tensor for name, tensor in found.items()}
    renamed = {_NORM.sub(lambda m: f"parametrizations.{m[1]}.original{m[2] == 'v':d}", n): t for n, t in bare.items()}
    for tensors in (found, bare, renamed) if needed else ():
        ends = [name for name in tensors if f".{name}".endswith(f".{needed[0]}")]
        prefixes = [name.removesuffix(needed[0]) for name in ends]
        whole = [prefix for prefix in prefixes if all(prefix + name in tensors for name in needed)]
        if len(whole) > 1 and "" not in whole:
            raise UserError(f"these are the model's weights more than once: {listed(whole)}", "Save one of them alone.")
        if whole:
            prefix = min(whole)
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    return bare if len(bare) == len(found) else found


def listed(items: Sequence[str]) -> str:
    """The first few of some names, for an error."""
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


@dataclass(frozen=True)
class Card:
    """How a trained model is to be used: what goes in, and what comes out means."""

    model: str  # as --model takes it
    classes: tuple[str, ...]  # output k is classes[k]
    shape: tuple[int, int, int]  # channels, height and width of a picture before augmentation
    image_size: int  # the side that the model sees (0: as `shape` has it)
    crop_pct: float  # of a picture's short side, that the centre keeps: timm's word
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    precision: str
    tta: str
    eval_batch_size: int  # images of one forward pass: other shapes may round otherwise
    dataset: str
    interpolation: str = "bilinear"
    initial_weights: str = ""  # whose the run began with: source and licence
    outputs: str = "softmax"  # what makes probabilities of logits; "sigmoid": each class for itself
    thresholds: tuple[float, ...] = ()  # several labels a picture: the probability from which each class is there
    decode_size: int = 0  # the shorter side that a picture is shrunk to first, upright (0: it is taken as stored)

    @property
    def side(self) -> int:
        """The side of an image as the model sees it, in pixels."""
        return self.image_size or self.shape[1]

    @classmethod
    def of(cls, config: Config, images: ImageSet, initial_weights: str = "") -> "Card":
        """The card of what a config trains on a set."""
        return cls(
            model=config.model.model,
            classes=tuple(images.classes),
            shape=images.shape,
            image_size=config.data.image_size,
            crop_pct=getattr(images, "crop_pct", 1.0),  # a set of arrays, or a user's own, has whole pictures
            mean=tuple(images.mean),
            std=tuple(images.std),
            precision=config.precision,
            tta=config.tta,
            eval_batch_size=config.execution.eval_batch_size,
            dataset=config.data.dataset,
            interpolation=getattr(images, "interpolation", "bilinear"),
            initial_weights=initial_weights,
            decode_size=config.data.decode_size,
            outputs="sigmoid" if config.optim.loss == "bce" else "softmax",
        )

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it: text as it is, the rest as JSON."""
        values = dataclasses.asdict(self)
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}

    @classmethod
    def read(cls, path: str | Path) -> "Card":
        """The card in a weights file. Raises UserError where that is damaged, or has none, or a damaged one."""
        with _damage_named(path):
            return cls.from_metadata(read_tensors(Path(path))[1], str(path))

    @classmethod
    def from_metadata(cls, metadata: dict[str, str], where: str) -> "Card":
        """The card among a file's metadata; `where` names the file in the error."""
        hints = get_type_hints(cls)
        later = {"thresholds"} - metadata.keys()  # files of before have none
        if missing := [name for name in hints if name not in metadata and name not in later]:
            remedy = "Name a run folder, or weights that `lockstep train` or `lockstep export` left."
            raise UserError(f"{where} does not say what model it is for: {', '.join(missing)} missing", remedy)
        try:
            card = cls(**{name: _parse(metadata[name], hint) for name, hint in hints.items() if name not in later})
            sound = len(card.shape) == 3 and len(card.mean) == len(card.std) == card.shape[0] and card.side > 0
            sound = sound and 0 < card.crop_pct <= 1 and card.eval_batch_size > 0 and all(card.std)
            sound = sound and card.decode_size >= 0 and card.outputs in ("softmax", "sigmoid")
            sound = sound and card.interpolation in ("bilinear", "bicubic") and card.tta in get_args(Tta)
            sound = sound and card.precision in get_args(Precision) and all(0 <= t <= 1 for t in card.thresholds)
            sound = sound and len(card.thresholds) in (0, len(card.classes))
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: what it says of its model is damaged: {error}", _AGAIN) from error
        if not sound:
            raise UserError(f"{where}: what it says of its model can't be: {card}", _AGAIN)
        return card


def _parse(text: str, hint: Any) -> Any:
    if hint is str:
        return text
    value = json.loads(text)
    if hint in (int, float):
        return hint(value)
    if not isinstance(value, list):
        raise ValueError(f"{text[:40]} is no list")
    return tuple(hint.__args__[0](item) for item in value)
