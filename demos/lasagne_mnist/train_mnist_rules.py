"""Train Lasagne's MNIST networks at the own pace of each process, with a training rule.

    python train_mnist_rules.py --rule EASGD --processes 2 --plot curve.png

The other scripts average the gradients of all processes in every step. Here a rule says what the
processes exchange, and when: parameters with a center that belongs to none of them (EASGD, Downpour,
ASGD, SSP), an average after one or several steps (BSP, LocalSGD, DiLoCo), or messages to each other
(GoSGD). After each epoch the center, or the average, is validated.
"""

import command_line
import network
import rule_script
import script
import training
import numpy as np
import synkhronos as synk
from synkhronos.extensions import rules, updates

# What the ranks of these rules change is added up in the center. With a momentum, whose effect comes
# steps later, the sum of several ranks diverges more easily.
ADDED_UP = ("Downpour", "ASGD", "SSP")


def build(digits, options):
    """Return the parameters, the training step, and the function that evaluates."""
    model = network.build_model(options)
    if options.rule in ADDED_UP or options.momentum:
        how = updates.sgd, {}
    else:
        how = updates.nesterov_momentum, {"momentum": training.MOMENTUM}
    step = rules.make_step(
        model.losses.mean(),
        model.params,
        [model.x, model.y],
        how[0],
        learning_rate=options.learning_rate,
        **how[1],
    )
    measured = {"loss": model.valid_loss, "accuracy": model.accuracy}
    return model.params, step, synk.function([model.x, model.y], measured)


def main(arguments=None):
    parser = command_line.parser(__doc__)
    script.add_processes(parser)
    rule_script.add_options(parser)
    options = parser.parse_args(arguments)
    rule = rule_script.make_rule(parser, options)
    n = options.processes = script.fork(options.processes, devices=options.devices)
    digits = command_line.prepare(options)
    batch_size = max(1, options.batch_size // n)
    print(f"Rule:   {rule!r}, {n} process(es), {batch_size} rows of each in a step", flush=True)
    params, step, measure = build(digits, options)
    data = {part: [synk.data(array) for array in arrays] for part, arrays in digits.parts.items()}
    record = rule_script.train(
        step,
        params,
        data["train"],
        rule,
        options,
        batch_size=batch_size,
        epochs=options.epochs,
        validate=(measure, data["valid"]),
    )
    rule_script.print_validations(record)
    slices = -(-len(digits.parts["test"][1]) // (n * training.ROWS_A_SLICE))
    tested = measure(*data["test"], num_slices=slices)
    print(f"Test:   loss {tested['loss']:.4f}, accuracy {tested['accuracy']:.2%}")
    rule_script.print_times(record)
    if options.plot:
        record.plot(options.plot, ["loss"])
        print(f"Plot:   {options.plot}")
    synk.close()
    return record, float(np.asarray(tested["accuracy"]))


if __name__ == "__main__":
    script.run(main)
