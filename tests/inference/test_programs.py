"""Exported programs compute what the model does, know what they are, and are run before they get their name."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.cli import main
from lockstep.commands.export import Export, export
from lockstep.data.layout import load_folders
from lockstep.errors import UserError
from lockstep.inference import programs
from lockstep.inference.classifier import Classifier
from lockstep.inference.pictures import find
from lockstep.processes.files import write_text
from tests.inference.runs import CLASSES, config, leave_a_run


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
    for form in ("onnx", "pt2"):
        path = tmp_path / f"net.{form}"
        with pytest.raises(SystemExit) as end:
            main(["export", str(trained), "--to", form, "--out", str(path)])
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (0, f"{path}\n")
        assert "compared with the model on 12 pictures: logits up to" in err
        program = ls.load(path, trust_code=True)
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
    with pytest.raises(SystemExit) as end:
        main(["predict", str(tmp_path / "net.onnx"), files[0], "--nproc", "1", "--device", "cpu", "--top", "1"])
    assert (end.value.code, capsys.readouterr().out.split()[1]) == (0, classifier.classify(files[0])[0].classes[0])


def test_a_program_that_differs_gets_no_name(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = programs.Program.forward

    def wrong(self: programs.Program, images: Tensor) -> Tensor:
        return right(self, images) * 1.001

    monkeypatch.setattr(programs.Program, "forward", wrong)
    with pytest.raises(UserError, match=r"the pt2 program differs from the model by .* in logits of up to"):
        export(trained, Export("pt2", out=str(tmp_path / "net.pt2")))
    assert list(tmp_path.iterdir()) == []


def test_several_views_of_an_image_are_part_of_the_program(trained: Path, tmp_path: Path) -> None:
    whole = ls.load(trained)
    mirrored = Classifier(whole.model, replace(whole.card, tta="mirror", precision="bf16"))
    programs.save(mirrored, tmp_path / "net.pt2", "pt2")
    program = programs.load(tmp_path / "net.pt2")
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert (program.card.tta, program.card.precision) == ("none", "fp32")
    worst, largest = programs.largest_difference(program, mirrored, images)
    assert worst <= programs.BOUND * max(1.0, largest)
    assert programs.largest_difference(program, whole, images)[0] > programs.BOUND * largest


def test_what_is_no_program_or_can_run_code_is_refused(trained: Path, tmp_path: Path) -> None:
    _, val = load_folders(trained / "data", 16, 0, False)
    torn, empty = tmp_path / "torn.onnx", tmp_path / "empty.pt2"
    torn.write_bytes(b"onnx")
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("archive/version", "0")
    with pytest.raises(UserError, match=r"torn\.onnx can't be read"):
        ls.load(torn)
    with pytest.raises(UserError, match="reading one can run code"):
        ls.load(empty)
    with pytest.raises(UserError, match=r"empty\.pt2 can't be read"):
        ls.load(empty, trust_code=True)
    with pytest.raises(UserError, match="would name pictures"):
        export(trained / "weights" / "best.safetensors", Export("pt2", out=str(tmp_path / "net.pt2")))
    assert len(val) == 12
