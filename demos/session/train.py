"""A session: a model of plain Theano, Lasagne or Keras on all processes, with any training rule.

    python train.py --model lasagne --rule EASGD --processes 2

Each model is a class in a file of its own here, with the attributes and methods of Theano-MPI's models.
Nothing in them is about processes but the rank's share of the batches.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import script

script.need("sklearn")
from synkhronos.extensions.session import Recorder, Session, compare

MODELS = {
    "theano": "theano_model:TheanoModel",
    "lasagne": "lasagne_model:LasagneModel",
    "keras": "keras_model:KerasModel",
}
RULES = ("BSP", "EASGD", "GoSGD", "LocalSGD", "DiLoCo", "ASGD", "Downpour", "SSP")


def options():
    whole = script.whole
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2)
    parser.add_argument("--model", choices=MODELS, default="theano", help="default: theano")
    parser.add_argument("--rule", choices=RULES, default="BSP", help="default: BSP")
    parser.add_argument(
        "--sync-type", choices=("avg", "cdd"), default="avg", help="for BSP (default: avg)"
    )
    parser.add_argument("--epochs", type=whole(0, 10_000), default=10, help="default: 10")
    parser.add_argument("--batch", type=whole(1, 100), default=20, help="rows (default: 20)")
    parser.add_argument("--learning-rate", type=script.positive(), help="default: the model's own")
    parser.add_argument("--scale-lr", action="store_true", help="times the number of processes")
    parser.add_argument("--warmup", type=whole(0), default=0, help="epochs (default: 0)")
    parser.add_argument("--checkpoint", type=script.new_file, help="to continue from, if it exists")
    parser.add_argument("--print-every", type=whole(0), default=20, help="batches (default: 20)")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="a folder for TensorBoard")
    parser.add_argument("--plot", type=script.image_file, help="draw the losses and errors")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=0)
    return parser.parse_args()


def main():
    given = options()
    if given.model == "lasagne":
        script.need("lasagne")
    if given.model == "keras":
        script.need("keras", extra="keras,demos")
    config = {"n_epochs": given.epochs, "batch_size": given.batch, "seed": given.seed}
    if given.learning_rate is not None:
        config["learning_rate"] = given.learning_rate
    try:
        session = Session(
            MODELS[given.model], given.rule, given.devices or given.processes,
            Recorder(print_every=given.print_every, tensorboard=given.tensorboard),
            given.checkpoint, sync_type=given.sync_type, config=config, scale_lr=given.scale_lr,
            warmup=given.warmup, seed=given.seed,
        )  # fmt: skip
    except (ValueError, ImportError) as error:
        raise script.UserError(str(error)) from error
    script.say_too_small()
    record = session.run()
    print(f"\n{record.table()}")
    if given.plot:
        compare({f"{given.model}, {given.rule}": record}, given.plot)


if __name__ == "__main__":
    script.run(main)
