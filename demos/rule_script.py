"""What the demos that train with a rule have in common: the rule's options, checkpoints, errors."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run lasagne_mnist/train_mnist_rules.py.")

import argparse
import contextlib
import inspect

import script
import synkhronos as synk
from synkhronos.extensions import rules

RULES = {
    rule.__name__: rule
    for rule in (
        rules.BSP,
        rules.LocalSGD,
        rules.DiLoCo,
        rules.EASGD,
        rules.Downpour,
        rules.ASGD,
        rules.SSP,
        rules.GoSGD,
    )
}


def fraction(below_one=False):
    """Return a type of options: numbers from 0 to 1, or below 1."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if 0 <= float(text) <= 1 and not (below_one and float(text) == 1):
                return float(text)
        limit = "less than 1" if below_one else "at most 1"
        raise argparse.ArgumentTypeError(f"expected a number of at least 0 and {limit}, got {text!r}")

    return convert


# The hyper-parameters of all rules. Their defaults are the rules' own defaults.
HYPER = {
    "period": (script.whole(), "STEPS", "steps between two exchanges"),
    "average": (str, "WHAT", "what is averaged: gradients or params"),
    "alpha": (script.positive(1), "FRACTION", "how far parameters and center move together"),
    "momentum": (fraction(below_one=True), "NUMBER", "momentum in the rule"),
    "push_period": (script.whole(), "STEPS", "steps between two pushes"),
    "pull_period": (script.whole(), "STEPS", "steps between two pulls"),
    "staleness": (script.whole(0), "STEPS", "how far a process may be ahead of the slowest"),
    "probability": (fraction(), "NUMBER", "of a message after a step"),
    "outer_learning_rate": (script.positive(), "RATE", "of the step of all processes"),
    "outer_momentum": (fraction(below_one=True), "NUMBER", "of the step of all processes"),
}


def hyper_parameters(rule):
    """Return the hyper-parameters of a rule that are options, with their defaults."""
    given = inspect.signature(rule).parameters.values()
    return {one.name: one.default for one in given if one.name in HYPER}


def rule_name(text):
    """Type of options: the name of a rule, in capital or small letters."""
    for name in RULES:
        if name.lower() == text.lower():
            return name
    raise argparse.ArgumentTypeError(f"expected one of {', '.join(RULES)}, got {text!r}")


def add_options(parser, default="EASGD"):
    """Add the options of a rule, its hyper-parameters and its checkpoints to a parser."""
    group = parser.add_argument_group("the training rule")
    names = ", ".join(RULES)
    group.add_argument(
        "--rule",
        type=rule_name,
        metavar="NAME",
        default=default,
        help=f"{names} (default: {default})",
    )
    for name, (kind, shown, what) in HYPER.items():
        defaults = {one: hyper_parameters(RULES[one]).get(name) for one in RULES}
        of = ", ".join(f"{one} {value}" for one, value in defaults.items() if value is not None)
        option = f"--{name.replace('_', '-')}"
        choices = ("gradients", "params") if name == "average" else None
        group.add_argument(
            option, type=kind, metavar=shown, choices=choices, help=f"{what} (defaults: {of})"
        )
    group.add_argument(
        "--checkpoint",
        type=script.new_file,
        metavar="FILE",
        help="save all that is needed to go on here, after each epoch",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the --checkpoint, with the hyper-parameters that it has",
    )


def make_rule(parser, options):
    """Return the rule that the options select; end the script if they do not fit it."""
    rule = RULES[options.rule]
    known = hyper_parameters(rule)
    given = {name: getattr(options, name) for name in HYPER}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() - known.keys():
        own = ", ".join(f"--{one.replace('_', '-')}" for one in known) or "none"
        parser.error(f"--{name.replace('_', '-')}: {options.rule} does not have it; it has {own}")
    if options.resume and not (options.checkpoint and options.checkpoint.exists()):
        parser.error(f"--resume needs a --checkpoint that exists, got {options.checkpoint}")
    if options.checkpoint and options.checkpoint.exists() and not options.resume:
        parser.error(
            f"--checkpoint: {str(options.checkpoint)!r} exists already; add --resume to go on from "
            f"it, or name another file"
        )
    return rule(**given)


def train(step, params, data, rule, options, **arguments):
    """Train by `rules.train`; what a user can change is a `UserError`. Return the record."""
    try:
        record = rules.train(
            step,
            params,
            data,
            rule,
            seed=options.seed,
            checkpoint=options.checkpoint,
            **arguments,
        )
    except FloatingPointError as error:
        raise script.UserError(str(error)) from error
    except synk.WorkerError as error:
        if error.type_name != FloatingPointError.__name__:
            raise
        raise script.UserError(error.message) from error
    except ValueError as error:
        if not options.resume:
            raise
        raise script.UserError(str(error)) from error  # it is a checkpoint of something else
    if record.interrupted:
        steps = ", ".join(str(len(losses)) for losses in record.losses)
        then = ""
        if options.checkpoint:
            then = f"; use --resume --checkpoint {options.checkpoint} to go on"
        print(f"Stopped after {steps} steps of the processes{then}", flush=True)
        raise KeyboardInterrupt
    return record


def print_validations(record):
    """Print a table of the validations: of the center, or of the average of all processes."""
    print("epoch  validated by  seconds  valid loss  valid accuracy")
    for one in record.validations:
        who = "all" if one["rank"] is None else f"process {one['rank']}"
        print(
            f"{one['epoch']:5d}  {who:12}  {one['seconds']:7.2f}  {one['loss']:10.4f}  "
            f"{one['accuracy']:14.2%}"
        )


def print_times(record):
    """Print how fast each process was, and all of them."""
    steps = ", ".join(str(len(losses)) for losses in record.losses)
    rows = sum(samples[-1] for samples in record.samples if samples)
    print(
        f"Time:   {record.elapsed:.2f} s with validations, {rows / record.elapsed:.0f} rows/s; steps "
        f"of the processes: {steps}"
    )
