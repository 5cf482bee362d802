"""Exported programs compute what the model does, know what they are, and are run before they get their name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.commands.export import Export, export
from lockstep.distributed.files import write_text
from lockstep.errors import UserError
from lockstep.inference import programs
from lockstep.inference.classifier import Classifier
from lockstep.inference.pictures import find
from tests.inference.runs import CLASSES, config, leave_a_run
from tests.inprocess import said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = leave_a_run(tmp_path_factory.mktemp("run"))
    write_text(run / "config.json", json.dumps(config(run / "data").to_dict()))
    return run


def test_a_program_answers_as_the_model_and_carries_its_card(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifier, files = ls.load(trained), find([str(trained / "data" / "val")])
    images = torch.stack([classifier.transform(file) for file in files])
    path = tmp_path / "net.onnx"
    out, err = said(capsys, "export", trained, "--to", "onnx", "--out", path)
    assert out == f"{path}\n"
    assert "compared with the model on 16 random images: logits up to" in err
    program = ls.load(path)
    assert program.card == classifier.card
    for batch in (images, images[:1], images[:7]):
        torch.testing.assert_close(program(batch), classifier(batch), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(program.classify(*files), classifier.classify(*files), strict=True):
        assert ours.classes == theirs.classes
    # by the other program alone, as somebody else would
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    np.testing.assert_allclose(logits, classifier(images).detach().numpy(), rtol=1e-4, atol=1e-5)
    onnx.checker.check_model(onnx.load(tmp_path / "net.onnx"))
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == sorted(CLASSES)
    out, _ = said(capsys, "predict", path, files[0], "--nproc", "1", "--device", "cpu", "--top", "1")
    assert out.split()[1] == classifier.classify(files[0])[0].classes[0]


def test_a_program_that_differs_gets_no_name(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = programs.Program.forward

    def wrong(self: programs.Program, images: Tensor) -> Tensor:
        return right(self, images) * 1.001

    monkeypatch.setattr(programs.Program, "forward", wrong)
    with pytest.raises(UserError, match=r"the program differs from the model by .* in logits of up to"):
        export(trained, Export("onnx", out=str(tmp_path / "net.onnx")))
    assert list(tmp_path.iterdir()) == []


def test_several_views_of_an_image_are_part_of_the_program(trained: Path, tmp_path: Path) -> None:
    whole = ls.load(trained)
    mirrored = Classifier(whole.model, replace(whole.card, tta="mirror", precision="bf16"))
    programs.save(mirrored, tmp_path / "net.onnx")
    program = programs.load(tmp_path / "net.onnx")
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert (program.card.tta, program.card.precision) == ("none", "fp32")
    worst, largest = programs.largest_difference(program, mirrored, images)
    assert worst <= programs.BOUND * max(1.0, largest)
    assert programs.largest_difference(program, whole, images)[0] > programs.BOUND * largest


def test_what_is_no_program_is_refused_and_weights_alone_make_one(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.onnx").write_bytes(b"onnx")
    with pytest.raises(UserError, match=r"torn\.onnx can't be read"):
        ls.load(tmp_path / "torn.onnx")
    path = export(trained / "weights" / "best.safetensors", Export("onnx", out=str(tmp_path / "net.onnx")))
    assert ls.load(path).card == ls.load(trained).card
