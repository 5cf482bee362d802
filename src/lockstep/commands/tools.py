"""The commands around runs: each takes its words, and returns the exit code.

torch is imported only where a command needs it, so that help answers at once.
"""

import dataclasses
from typing import Any

from lockstep.commands.shared.arguments import complain, one_name, parse, planned
from lockstep.config import Config
from lockstep.config.flags import sort_words
from lockstep.config.recipes import recipe
from lockstep.errors import EXIT_FAILURE, UserError, unknown


def verify(args: list[str]) -> int:
    """Compare the first steps on several numbers of processes."""
    from lockstep.commands.verify.plan import Plan

    about = (
        "Run the first steps of the recipe `{}` on several numbers of processes, compare ledger, images, losses, "
        "gradients, weights, buffers and evaluation, and name what makes them differ. Exit code 0: the mode's claim "
        "holds (--shards: the same bits; else: the same but for rounding), 1: it does not. --out DIR keeps the traces."
    )
    plan: Plan = planned("verify", Plan, Plan.of, args, about)
    from lockstep.commands.verify.run import verify
    from lockstep.commands.verify.verdict import show

    show(report := verify(plan, say=complain))
    return 0 if report.holds else EXIT_FAILURE


def chaos(args: list[str]) -> int:
    """Kill a training at random, and compare what comes back."""
    from lockstep.commands.chaos import Plan, chaos, show

    def often(config: Config) -> Plan:
        recovery = dataclasses.replace(config.recovery, checkpoint_every="10steps")
        return Plan(config=dataclasses.replace(config, recovery=recovery))

    about = (
        "Train by the recipe `{}` while killing processes and the launcher at random moments, let it recover, and "
        "compare ledger and (with --shards) weights with an undisturbed run. Exit code 0: all came back the same."
    )
    plan: Plan = planned("chaos", Plan, often, args, about)
    show(report := chaos(plan, say=complain))
    return 0 if report.holds else EXIT_FAILURE


def compare(args: list[str]) -> int:
    """Measure strategies under equal conditions."""
    from lockstep.commands.compare.plan import Plan

    about = (
        "Train by the recipe `{}` with each strategy on each number of processes, in turns, with the same global "
        "batch, order, evaluation, total threads and total --workers, and table speed, waiting, memory and accuracy. "
        "The same command with the same --out goes on with what is missing. Exit code 1: the rows are not comparable."
    )
    plan: Plan = planned("compare", Plan, Plan.of, args, about)
    from lockstep.commands.compare.run import compare
    from lockstep.commands.compare.tables import show

    show(results := compare(plan, say=complain))
    return 0 if results["fair"] else EXIT_FAILURE


def predict(args: list[str]) -> int:
    """Predict the step on N processes."""
    from lockstep.commands.forecast.plan import Plan

    about = "Measure the recipe `{}` briefly and predict its step on N processes; --out names a file or folder."
    plan: Plan = planned("predict", Plan, Plan.of, args, about)
    from lockstep.commands.forecast.forecast import predict
    from lockstep.commands.forecast.show import tell

    tell(predict(plan, say=complain))
    return 0


def doctor(args: list[str]) -> int:
    """Try what a run needs from this machine and the network."""
    from lockstep.commands.doctor.plan import Plan

    names, rest = sort_words(args, Plan)
    if names:
        raise UserError(
            f"doctor takes flags alone, got {' '.join(names)}", "Values follow a flag: --only host,network."
        )
    about = (
        "Try what a run needs: all-reduces between processes and GPUs, ports, names, disk, memory, cores, the way to "
        "machine 0; each with a deadline. Exit code 1: a check failed (a warning does not)."
    )
    plan: Plan = parse(Plan, Plan(), rest, "lockstep doctor", about)
    from lockstep.commands.doctor.run import doctor
    from lockstep.commands.doctor.show import as_json, healthy, show, summary

    found = doctor(plan, say=complain, show=(lambda _: None) if plan.json else show)
    print(as_json(found) if plan.json else summary(found))
    return 0 if healthy(found) else EXIT_FAILURE


def launch_script(args: list[str]) -> int:
    """Write the file or the lines that start a run on a cluster."""
    from lockstep.commands.launch_script.targets import TARGETS, deliver

    usage = f"lockstep launch-script {'|'.join(TARGETS)} [RECIPE] [FLAGS]"
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\nIts flags, by target: lockstep launch-script slurm --help")
        return 0
    if args[0] not in TARGETS:
        raise unknown("target", args[0], TARGETS, f"As `{usage}`.")
    cls, script = TARGETS[args[0]]
    about = f"Write what starts the recipe `{{}}` by {args[0]}; every flag of `lockstep train` may follow."
    names, rest = sort_words(args[1:], cls)
    name = one_name(f"launch-script {args[0]}", "recipe", names) or "digits"
    prog = f"lockstep launch-script {args[0]} {name}"
    plan: Any = parse(cls, cls.of(recipe(name)), rest, prog, about.format(name))
    deliver(script(plan), plan.file)
    return 0
