"""Precision, compiling and the moving average of the weights as fields of a config, and what is said of them."""

import math
from typing import Any

from lockstep.commands.reproduce.copies import constant, warmed
from lockstep.commands.reproduce.experiment import Experiment
from lockstep.config import Precision

_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}
_SHOWN = 4  # decays that are listed
_GUESSED = 0.999  # the decay of an average whose warm-up has not ended


def precision(experiment: Experiment, meant: list[str], lost: list[str]) -> Precision:
    """The precision of an autocast that was seen."""
    record = experiment.record
    found: Precision = _PRECISIONS.get(record["autocast"], "fp32")
    if record["cuda"] and found != "fp32":
        meant.append(f"autocast: both columns are float32, as there is no GPU here; the recipe has --precision {found}")
    if record["skipped"]:
        lost.append(f"{record['skipped']} steps that the gradient scaler left out are not among those compared")
    return found


def model_fields(experiment: Experiment, meant: list[str]) -> dict[str, Any]:
    """How the model runs: NHWC, compiled."""
    record, found = experiment.record, dict[str, Any]()
    if record["channels_last"]:
        found["channels_last"] = True
    if record["compiled"]:
        mode = record["compiled"] if record["compiled"] in ("reduce-overhead", "max-autotune") else "default"
        found |= {"compile": True, "compile_mode": mode}
        meant.append("torch.compile: both columns run without it; the recipe has --compile")
    return found


def ema(experiment: Experiment, meant: list[str], lost: list[str]) -> dict[str, Any]:
    """The moving average that was seen; {}: none, or none that a flag says."""
    told, evaluated = experiment.record["average"], experiment.record["evaluated"]
    if not told:
        if "another" in evaluated:
            lost.append("the evaluated model is another than the trained one; the recipe evaluates what it trains")
        return {}
    decays, at = told["decays"], f" ({told['at']})" if told["at"] else ""
    found, warm = constant(decays), warmed(decays)
    if not (found or warm) or told["born"] or math.isnan(decays[0]):
        listed = ", ".join(f"{each:.4g}" for each in decays[:_SHOWN])
        why = "begins later" if told["born"] else f"keeps another part of itself each time: {listed}"
        lost.append(f"the moving average of the weights{at}: it {why}")
        return {}
    if warm and warm[1]:
        meant.append(f"the average's warm-up counts updates from 0, the script's from {warm[1]}")
    if warm and not warm[0]:
        lost.append(f"the decay at which the average's warm-up ends{at}: no step came to it; the recipe has {_GUESSED}")
    if decays[0] != 0:
        meant.append("the moving average begins with the weights after the first step, not with the first weights")
    if "average" not in evaluated:
        meant.append("the moving average is what the recipe evaluates; the script was not seen to")
    return {"ema": warm[0] or _GUESSED, "ema_warmup": True} if warm else {"ema": found}


def changed(experiment: Experiment, lost: list[str]) -> None:
    """Say what lies between the loader and the model that no data set has."""
    for what, at in experiment.record["changed"].items():
        where = f" ({at})" if at else ""
        lost.append(f"{what} are changed between the loader and the {'model' if what == 'images' else 'loss'}{where}")
