"""States that are written with the wrapper's prefix, and read onto one device by all ranks; and neither."""

from pathlib import Path

import pytest

from tests.lint.shapes import BEFORE
from tests.lint.test_rules import codes_in

SCRIPT = """\
import copy
from safetensors.torch import save_file
def bare(model):
    return model.module if hasattr(model, "module") else model
def pack(model, epoch):
    return {"weights": model.state_dict(), "epoch": epoch}
def restore(model, path, where=None):
    model.load_state_dict(torch.load(path, map_location=where))
class Trainer:
    def __init__(self, model, path):
        self.model, self.path = model, path
        READ
def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = Net().cuda()
    LOAD
    model = DDP(net)
    trainer = Trainer(net, "last.pt")
    if rank == 0:
        SAVE
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
PREFIXED = [
    'torch.save(pack(model, 1), "last.pt")',
    'parts = {"model": model}\ntorch.save({key: part.state_dict() for key, part in parts.items()}, "last.pt")',
    'state = {"epoch": 1}\nstate.update(weights=model.state_dict())\ntorch.save(state, "last.pt")',
    'best = copy.deepcopy(model.state_dict())\ntorch.save(best, "last.pt")',
    'save_file(model.state_dict(), "last.safetensors")',
    'torch.save({key: value.cpu() for key, value in model.state_dict().items()}, "last.pt")',
]
PLAIN = [
    'torch.save(pack(model.module, 1), "last.pt")',
    'parts = {"model": net}\ntorch.save({key: part.state_dict() for key, part in parts.items()}, "last.pt")',
    'torch.save(bare(model).state_dict(), "last.pt")',
    'inner = model.module if isinstance(model, DDP) else model\ntorch.save(inner.state_dict(), "last.pt")',
    'torch.save({key[7:]: value for key, value in model.state_dict().items()}, "last.pt")',
]
ONTO_ONE = [
    'restore(net, "last.pt")',
    'net.load_state_dict(torch.load("last.pt", map_location="cuda:0"))',
    'options = {"weights_only": True}\nnet.load_state_dict(torch.load("last.pt", **options))',
]
ONTO_OWN = [
    'restore(net, "last.pt", "cpu")',
    'net.load_state_dict(torch.load("last.pt", map_location="cuda"))',
    'options = {"map_location": "cpu"}\nnet.load_state_dict(torch.load("last.pt", **options))',
]
READ = "if os.path.exists(path):\n            self.model.load_state_dict(torch.load(self.path, MAPweights_only=True))"


def _script(save: str = "pass", load: str = "pass", read: str = "pass") -> str:
    text = SCRIPT.replace("SAVE", save.replace("\n", "\n        ")).replace("LOAD", load.replace("\n", "\n    "))
    return BEFORE + text.replace("READ", read)


@pytest.mark.parametrize("save", PREFIXED)
def test_the_wrappers_state_is_saved(save: str, tmp_path: Path) -> None:
    assert codes_in(_script(save), tmp_path) == ["LS403"]


@pytest.mark.parametrize("save", PLAIN)
def test_the_networks_state_is_saved(save: str, tmp_path: Path) -> None:
    assert codes_in(_script(save), tmp_path) == []


@pytest.mark.parametrize(("load", "codes"), [(a, ["LS402"]) for a in ONTO_ONE] + [(b, []) for b in ONTO_OWN])
def test_where_a_state_is_loaded(load: str, codes: list[str], tmp_path: Path) -> None:
    assert [each for each in codes_in(_script(load=load), tmp_path) if each != "LS404"] == codes


def test_a_trainer_reads_its_checkpoint_when_it_is_made(tmp_path: Path) -> None:
    assert "LS402" in codes_in(_script(read=READ.replace("MAP", "")), tmp_path)
    assert "LS402" not in codes_in(_script(read=READ.replace("MAP", 'map_location="cpu", ')), tmp_path)
