"""An LSTM with elastic averaging, in the order of calls of Platoon's example."""

import numpy as np
from platoon.channel import Worker
from platoon.param_sync import EASGD

import sequences

parser = Worker.default_parser()
parser.add_argument("--valid_sync", action="store_true", default=False)
parser.add_argument("--param-sync-api", action="store_true", default=False)
args = parser.parse_args()

worker = Worker(**Worker.default_arguments(args))
random = np.random.RandomState(123 + worker.global_rank)  # each worker draws other minibatches
train, valid, test = (sequences.load(n, seed) for seed, n in enumerate((400, 200, 200)))
params = sequences.init_params()
if args.param_sync_api:
    worker.init_shared_params(params, param_sync_rule=EASGD(0.5))
else:
    from platoon.training import global_dynamics as gd

    easgd = gd.EASGD(worker)
    easgd.make_rule(params, sequences.init_params(), 0.5)
f_grad_shared, f_update, f_pred = sequences.build(params)
rows = sequences.minibatches(400, 16, random)
if args.param_sync_api:
    worker.copy_to_local()
worker.all_reduce(np.zeros(1))  # both begin together, so that neither finds all steps done

while True:
    step = worker.send_req("next")
    if step == "train":
        for _ in range(10):
            batch = next(rows)
            cost = f_grad_shared(train[0][batch], train[1][batch])
            f_update(2.0)
        print("Train cost:", cost, flush=True)
        step = worker.send_req("done", {"train_len": 10})
        if args.param_sync_api:
            worker.sync_params(synchronous=True)
        else:
            easgd()
    if step == "valid":
        if args.param_sync_api and args.valid_sync:
            worker.copy_to_local()
        res = worker.send_req(
            "pred_errors",
            {
                "test_err": sequences.pred_error(f_pred, test),
                "valid_err": sequences.pred_error(f_pred, valid),
            },
        )
        print("Valid", res, flush=True)
        if args.param_sync_api and args.valid_sync:
            worker.copy_to_local()
    if step == "stop":
        break

worker.close()
