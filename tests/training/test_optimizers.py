"""The optimizers by name, and Muon with AdamW as one real optimizer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import OptimConfig
from lockstep.errors import UserError
from lockstep.training.optimizers import MuonAdamW, _as_matrix, _dim_order, build

NAMES = ("sgd", "adam", "adamw", "adadelta", "muon", "muon-sgd")


def _model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return nn.Sequential(*layers)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _by_shape(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Norms and biases are not decayed."""
    vectors = [p for p in parameters if p.ndim == 1]
    return [{"params": [p for p in parameters if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, weight_decay=0.01)),
        ("adam", lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.01)),
        ("adamw", lambda p: torch.optim.AdamW(_by_shape(list(p)), 0.05, weight_decay=0.01)),
        ("adadelta", lambda p: torch.optim.Adadelta(p, 0.05, weight_decay=0.01)),
    ],
)
def test_a_name_is_torchs_optimizer_with_the_configs_values(name: str, theirs: object) -> None:
    ours, reference = _model(), _model()
    config = OptimConfig(optimizer=name, momentum=0.8, weight_decay=0.01)
    _steps(ours, build(ours, config, 0.05), 3)
    _steps(reference, theirs(reference.parameters()), 3)
    assert torch.equal(_weights(ours), _weights(reference))


def test_nesterov_reaches_sgd() -> None:
    optimizer = build(_model(), OptimConfig(nesterov=True), 0.1)
    assert optimizer.param_groups[0]["nesterov"] is True


@pytest.mark.parametrize("name", NAMES)
def test_real_optimizers_frozen_parameters_and_initial_lr(name: str) -> None:
    model = _model()
    model[0].requires_grad_(False)
    config = OptimConfig(optimizer=name)
    optimizer = build(model, config, 0.3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(group["initial_lr"] == group["lr"] for group in optimizer.param_groups)
    peaks = {group["lr"] for group in optimizer.param_groups}
    assert 0.3 in peaks if name == "muon-sgd" else peaks == {0.3}  # SGD's rates there are its own
    with pytest.raises(UserError, match="no parameter to train"):
        build(model.requires_grad_(False), config, 0.1)


@pytest.mark.parametrize("name", [*NAMES, "timm:lamb", "timm:lion"])
def test_state_goes_round_through_a_dict_and_training_goes_on_the_same(name: str) -> None:
    config = OptimConfig(optimizer=name)
    model = _model()
    optimizer = build(model, config, 0.01)
    _steps(model, optimizer, 3)
    resumed = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    _steps(model, optimizer, 3, first=3)
    other = build(resumed, config, 0.9)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.01
    _steps(resumed, other, 3, first=3)
    assert torch.equal(_weights(model), _weights(resumed))


def test_muon_is_torchs_muon_on_matrices_and_torchs_adamw_on_the_rest() -> None:
    ours, reference = _model(), _model()
    _steps(ours, build(ours, OptimConfig(optimizer="muon", momentum=0.95, weight_decay=0.1), 0.02), 3)
    parameters = list(reference.parameters())
    # the reference trains 2-D leaves: gradients are handed over by hand
    flat = [p.detach().reshape(len(p), -1).clone() for p in parameters if p.ndim >= 2]
    muon = torch.optim.Muon(flat, 0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for p in parameters if p.ndim < 2], 0.02, weight_decay=0.0)

    class Both:
        def zero_grad(self) -> None:
            reference.zero_grad()

        def step(self) -> None:
            matrices = [p for p in parameters if p.ndim >= 2]
            for leaf, p in zip(flat, matrices, strict=True):
                leaf.grad = p.grad.reshape(leaf.shape)
            muon.step()
            adamw.step()
            for leaf, p in zip(flat, matrices, strict=True):
                p.data.copy_(leaf.view(p.shape))

    _steps(reference, Both(), 3)  # type: ignore[arg-type]
    torch.testing.assert_close(_weights(ours), _weights(reference), rtol=0, atol=0)


def test_muon_trains_views_of_the_same_memory_in_any_format() -> None:
    for shape, layout in (((4, 3), None), ((4, 3, 2, 5), torch.contiguous_format), ((4, 3, 2, 5), torch.channels_last)):
        parameter = torch.randn(shape)
        if layout is not None:
            parameter = parameter.contiguous(memory_format=layout)
        view = _as_matrix(parameter, _dim_order(parameter))
        assert view.shape == (4, parameter[0].numel())
        assert view.data_ptr() == parameter.data_ptr()
        view.fill_(7)
        assert bool((parameter == 7).all())


def test_muon_takes_the_same_steps_in_either_memory_format_and_changes_it_in_mid_run() -> None:
    config = OptimConfig(optimizer="muon")
    plain, last = _model(), _model().to(memory_format=torch.channels_last)
    first, second = build(plain, config, 0.01), build(last, config, 0.01)
    _steps(plain, first, 2)
    _steps(last, second, 2)
    torch.testing.assert_close(_weights(plain), _weights(last), rtol=0, atol=2e-3)  # Muon computes in bfloat16
    assert second.state[last[0].weight]["momentum_buffer"].shape == last[0].weight.shape
    # loaded into the other format, and the parameters' memory replaced under the optimizer
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    last.load_state_dict(plain.state_dict())
    plain.to(memory_format=torch.channels_last)
    before = _weights(plain)
    _steps(plain, first, 1, first=2)
    _steps(last, second, 1, first=2)
    assert torch.equal(_weights(plain), _weights(last))
    assert (_weights(plain) - before).abs().min() > 0


def test_muon_leaves_vectors_in_disguise_and_absent_gradients_alone() -> None:
    token, scale, matrix = (nn.Parameter(torch.ones(shape)) for shape in ((1, 1, 8), (8, 1, 1), (4, 2, 2)))
    unused = nn.Parameter(torch.ones(3, 3))
    optimizer = MuonAdamW([token, scale, matrix, unused], 0.1, momentum=0.9, weight_decay=0.0)
    muon, adamw = optimizer.param_groups
    assert [len(muon["params"]), len(adamw["params"])] == [2, 2]
    assert any(p is matrix for p in muon["params"])

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in (token, scale, matrix))
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 32.0
    assert bool((unused == 1).all())
    assert all(bool((p < 1).all()) for p in (token, scale, matrix))
    assert unused not in optimizer.state


def test_muon_works_under_a_gradient_scaler() -> None:
    model = _model()
    optimizer, scaler = build(model, OptimConfig(optimizer="muon"), 0.01), torch.amp.GradScaler("cpu")
    before = _weights(model)
    scaler.scale(model(torch.randn(2, 3, 6, 6)).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(before, _weights(model))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "muon"])
def test_on_a_gpu_the_kernels_are_fused_and_steps_are_the_cpus(name: str) -> None:
    config = OptimConfig(optimizer=name)
    model = _model()
    optimizer = build(model.cuda(), config, 0.01)
    assert optimizer.param_groups[-1]["fused"] is True
    before = _weights(model)
    nn.functional.cross_entropy(
        model(torch.randn(8, 3, 6, 6).cuda()), torch.zeros(8, dtype=torch.long).cuda()
    ).backward()
    optimizer.step()
    assert not torch.equal(before, _weights(model))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("torch.optim:SGD", "is an optimizer's class, not a factory"),
        ("os:getpid", r"can't be called with \(model, optim, lr\)"),
        ("builtins:dict", r"can't be called with \(model, optim, lr\)"),
        ("builtins:print", "returned a NoneType, not a torch optimizer"),
    ],
)
def test_what_is_no_factory_is_refused(path: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        build(nn.Linear(2, 2), OptimConfig(optimizer=path), 0.1)
    assert "The factory gets (model, optim, lr)" in str(refused.value)


def test_a_module_that_ends_the_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_that_runs.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="importing script_that_runs ended the program, exit code 0"):
        build(nn.Linear(2, 2), OptimConfig(optimizer="script_that_runs:make"), 0.1)
