"""Cases: two or three features, put together by a seed into one module that a user could have written."""

import random
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
# how often a feature of each kind is drawn, relative to the others
WEIGHTS = {
    "hook": 3.0, "step_hook": 1.0, "buffer": 3.0, "norm": 2.0, "draw": 3.5, "start": 1.0, "flow": 3.0, "shape": 0.7,
    "loss": 3.0, "optimizer": 2.0, "set": 2.0, "loop": 1.5, "size": 1.5, "flag": 1.0,
}  # fmt: skip
ALONE = ("optimizer", "loss", "returns", "sizes")  # slots that one feature of a case can fill
LOOP = {"loss", "setup", "start", "epoch", "batch", "after", "finish", "returns"}  # slots of a loop of the user's own
COMMAND = {"flags"}  # of `lockstep train`
IMPORTS = {
    "collections": "import collections", "dataclasses": "import dataclasses", "os": "import os",
    "random": "import random", "sys": "import sys", "tempfile": "import tempfile", "threading": "import threading",
    "time": "import time", "Path": "from pathlib import Path", "np": "import numpy as np", "torch": "import torch",
    "dist": "import torch.distributed as dist", "F": "import torch.nn.functional as F",
    "torch.nn.utils.prune": "import torch.nn.utils.prune", "save_file": "from safetensors.torch import save_file",
    "nn": "from torch import nn", "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "Dataset": "from torch.utils.data import Dataset", "ls": "import lockstep as ls",
}  # fmt: skip

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 16), nn.Linear(16, 4)
        {init}

    {methods}

    def forward(self, x):
        x = x.double()
        {image}
        m = F.max_pool2d(torch.relu(self.conv(x)), 2)
        {map}
        h = torch.tanh(self.fc(m.flatten(1)))
        {hidden}
        y = self.head(h)
        {logits}
        return {returns}


def make_model():
    model = Net().double()
    {model}
    return model
"""
DATA = """
def make_data():
    g = torch.Generator().manual_seed(1)
    images = torch.randn({samples} + 16, 1, 8, 8, generator=g)
    labels = (images.flatten(1) @ torch.randn(64, 4, generator=g)).argmax(1)
    train, val = list(range({samples})), list(range({samples}, {samples} + 16))
    {data}
    return {sets}
"""
PICTURES = """
class Pictures(Dataset):
    def __init__(self, images, labels, training):
        self.images, self.labels, self.training, self.classes = images, labels, training, list("abcd")
        {set_init}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.training:
            {item}
        return image, int(self.labels[i])
"""
OPTIMIZER = """
def make_optimizer(model, optim, lr):
    {optimizer}
"""
HOOKED = """
def build(model, lr):
    {optimizer}


def make_optimizer(model, optim, lr):
    optimizer = build(model, lr)
    {optimizer_hook}
    return optimizer
"""
TRAIN = """
def train(world, folder, seed, epochs):
    {start}
    train, val = ls.loaders(
        make_data(), world, batch_size={size}, accumulate={accumulate}, seed=seed, workers={workers}
    )
    net = make_model().to(world.device)
    model = ls.parallelize(net, world)
    optimizer = {make_optimizer}
    {setup}
    step = ls.TrainStep(model, loss, optimizer, seed=seed)
    for number, epoch in enumerate(train.epochs(epochs)):
        {epoch}
        for batch in epoch:
            {batch}
            value = step(batch)
            {after}
    {finish}
    metrics = ls.evaluate(model, val, world)
    if world.rank == 0:
        state = dict(net.state_dict())
        if isinstance(loss, nn.Module):
            state |= {"loss." + name: value for name, value in loss.state_dict().items()}
        state["evaluation.loss"] = torch.tensor(metrics.loss, dtype=torch.float64)
        save_file({name: value.clone() for name, value in state.items()}, folder + "/final.safetensors")


if __name__ == "__main__":
    nproc, folder, seed, epochs = sys.argv[1:]
    ls.launch(train, folder, int(seed), int(epochs), nproc=int(nproc))
"""
SGD = "return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)"


@dataclass(frozen=True)
class Feature:
    """A fragment of each slot that it fills; `fresh` where its outcome may hang on how the interpreter started."""

    name: str
    slots: dict[str, str]
    fresh: bool = False

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]


def read_features(text: str) -> dict[str, Feature]:
    """Features by name, of a text in the format of model_features.txt."""
    found = {}
    for block in re.split(r"^== ", text, flags=re.M)[1:]:
        name, _, body = block.partition("\n")
        parts = re.split(r"^(\w+):", body, flags=re.M)[1:]
        slots = {slot: textwrap.dedent(code).strip("\n ") for slot, code in zip(parts[::2], parts[1::2], strict=True)}
        found[name] = Feature(name, {k: v for k, v in slots.items() if k != "fresh"}, "fresh" in slots)
    return found


FEATURES = {
    name: feature
    for file in ("model_features.txt", "training_features.txt")
    for name, feature in read_features((HERE / file).read_text()).items()
}


@dataclass(frozen=True)
class Case:
    """What is trained: by `lockstep train`, in exact mode or not, or by a loop of the user's own."""

    name: str
    features: tuple[str, ...]
    exact: int = 0
    loop: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Samples, batch size and so on: the last batch is short, in exact mode with two samples for each slice."""
        sizes = {"samples": 68 if self.exact else 64, "size": 10, "accumulate": 1, "workers": 0}
        exec(self.fragment("sizes"), {}, sizes)
        return sizes

    @property
    def fresh(self) -> bool:
        return any(FEATURES[name].fresh for name in self.features)

    @property
    def plain(self) -> "Case":
        """The same run of a model, loss, optimizer and set without a feature."""
        sizes = tuple(name for name in self.features if FEATURES[name].kind in ("size", "flag"))
        return Case("plain", sizes, self.exact, self.loop)

    def fragment(self, slot: str) -> str:
        """The code of all features in a slot; the loss comes first, since others may use it."""
        ordered = sorted(self.features, key=lambda name: not name.startswith("loss."))
        return "\n".join(FEATURES[name].slots[slot] for name in ordered if slot in FEATURES[name].slots)

    def has(self, *slots: str) -> bool:
        return any(slot in FEATURES[name].slots for name in self.features for slot in slots)

    @property
    def own_optimizer(self) -> bool:
        return self.has("optimizer", "optimizer_hook")

    @property
    def names(self) -> set[str]:
        """Words by which a sentence may name what it is about: the layers, and what no plain module has."""
        plain = set(re.findall(r"\w+", replace(self, features=()).source() if self.features else ""))
        return set(re.findall(r"[A-Za-z_]{3,}", self.source())) - plain | {
            "conv",
            "fc",
            "head",
            "Net",
            "make_data",
            "SGD",
        }

    def flags(self) -> list[str]:
        """Of `lockstep train`, beside those of the run itself."""
        sizes = self.sizes
        given = [
            *("--dataset", "case:make_data", "--model", "case:make_model"),
            *("--optimizer", "case:make_optimizer" if self.own_optimizer else "sgd", "--lr", "0.05"),
            *("--batch-size", str(sizes["size"]), "--accumulate", str(sizes["accumulate"])),
            *("--workers", str(sizes["workers"]), *self.fragment("flags").split()),
        ]
        return given + (["--exact", str(self.exact)] if self.exact else [])

    def source(self) -> str:
        values = {slot: self.fragment(slot) for slot in slots_of(FEATURES.values())} | {
            k: str(v) for k, v in self.sizes.items()
        }
        values["returns"] = values["returns"] or "y"
        values["optimizer"] = values["optimizer"] or SGD
        values["start"] = values["start"] or "torch.manual_seed(seed)"
        values["make_optimizer"] = (
            "make_optimizer(model, None, 0.05)" if self.own_optimizer else SGD[7:].replace("lr=lr", "lr=0.05")
        )
        if self.has("input_gradient"):
            values["image"] = "x = x.requires_grad_(self.training)\n" + values["image"]
        template = "Pictures(images[{0}], labels[{0}], {1})" if self.has("item") else "(images[{0}], labels[{0}])"
        values["sets"] = ", ".join((template.format("train", True), template.format("val", False)))
        parts = [
            values["top"],
            fill(MODEL, values),
            fill(PICTURES, values) if self.has("item") else "",
            fill(DATA, values),
        ]
        if self.own_optimizer:
            parts.append(fill(HOOKED if self.has("optimizer_hook") else OPTIMIZER, values))
        if self.loop:
            loss = values["loss"] or ("" if "loss = " in values["setup"] else "loss = F.cross_entropy")
            parts += [loss, fill(TRAIN, values)]
        body = "\n\n\n".join(part.strip("\n") for part in parts if part)
        return "\n".join(line for name, line in IMPORTS.items() if used(name, body)) + f"\n\n\n{body}\n"


def used(name: str, code: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", code) is not None


def fill(template: str, values: dict[str, str]) -> str:
    """The template with each `{slot}` replaced; one that has a line to itself is indented as it is, or left out."""
    lines = []
    for line in template.splitlines():
        if alone := re.fullmatch(r"( +)\{(\w+)\}", line):
            lines += textwrap.indent(values[alone[2]], alone[1]).splitlines()
        else:
            lines.append(re.sub(r"\{(\w+)\}", lambda found: values[found[1]], line))
    return re.sub(r"\n\n\n+(?= )", "\n\n", "\n".join(lines))


def compatible(features: tuple[Feature, ...]) -> bool:
    """Whether a module can have all of them."""
    slots = [slot for feature in features for slot in feature.slots]
    kinds = [feature.kind for feature in features]
    return (
        len({feature.name for feature in features}) == len(features)
        and all(slots.count(slot) < 2 for slot in ALONE)
        and all(kinds.count(kind) < 2 for kind in ("size", "flag"))
        and not (LOOP & set(slots) and COMMAND & set(slots))
    )


def generate(seed: int, number: int, exact_share: float) -> Case:
    """Case `number` of a seed, alike on any machine."""
    draw = random.Random(f"{seed}-{number}")
    exact = 4 if draw.random() < exact_share else 0
    kinds = {kind: [feature for feature in FEATURES.values() if feature.kind == kind] for kind in WEIGHTS}
    while True:
        chosen = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=draw.choice((2, 2, 3)))
        features = tuple(draw.choice(kinds[kind]) for kind in chosen)
        slots = slots_of(features)
        if compatible(features) and not (exact and LOOP & slots):
            loop = bool(LOOP & slots) or (not exact and not COMMAND & slots and draw.random() < 0.2)
            return Case(f"{seed}-{number}", tuple(feature.name for feature in features), exact, loop)


def slots_of(features: Iterable[Feature]) -> set[str]:
    return {slot for feature in features for slot in feature.slots}


def smaller(case: Case) -> list[Case]:
    """The case without one of its features each, without exact mode, and by the command instead of a loop."""
    fewer = [replace(case, features=tuple(n for n in case.features if n != name)) for name in case.features]
    if case.exact:
        fewer.append(replace(case, exact=0))
    if case.loop and not LOOP & slots_of(FEATURES[name] for name in case.features):
        fewer.append(replace(case, loop=False))
    return [less for less in fewer if less.features]
