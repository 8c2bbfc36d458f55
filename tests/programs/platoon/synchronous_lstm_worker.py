"""An LSTM whose parameters are averaged after each step, as in Platoon's synchronous example."""

import numpy as np
from platoon.channel import Worker
from platoon.training.global_dynamics import AverageSGD

import sequences

parser = Worker.default_parser()
args = parser.parse_args()

worker = Worker(**Worker.default_arguments(args))
random = np.random.RandomState(worker.send_req("seed"))
parts = dict(
    zip(("train", "valid", "test"), (sequences.load(n, s) for s, n in enumerate((400, 200, 200))))
)
params = sequences.init_params()
asgd = AverageSGD(worker)
asgd.make_rule(params)
f_grad_shared, f_update, f_pred = sequences.build(params)
splits = worker.send_req("splits", {f"{name}_len": len(y) for name, (_, y) in parts.items()})
train, valid, test = (
    [array[slice(*splits[f"{name}_splits"])] for array in arrays] for name, arrays in parts.items()
)
rows = sequences.minibatches(len(train[1]), 20, random)

while True:
    for _ in range(len(train[1]) // 20):
        batch = next(rows)
        cost = f_grad_shared(train[0][batch], train[1][batch])
        f_update(2.0)
        asgd()
    print("Train cost:", cost, "sum of b:", float(params[-2].get_value().sum()), flush=True)
    errors = {
        "test_err": sequences.pred_error(f_pred, test),
        "valid_err": sequences.pred_error(f_pred, valid),
    }
    if worker.send_req("pred_errors", errors) == "stop":
        break

worker.close()
