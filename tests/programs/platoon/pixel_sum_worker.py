"""A worker that adds up images with a rule of its own, in the order of calls of Platoon's example."""

from collections import OrderedDict

import numpy as np
import theano
import theano.tensor as T
from platoon.channel import Worker
from platoon.param_sync import ParamSyncRule

import pixels


class SumSync(ParamSyncRule):
    def update_params(self, local_params, master_params):
        master_params[0] += local_params[0]
        local_params[0].fill(0)


parser = Worker.default_parser()
parser.add_argument("--batch_port", default=5566, type=int)
args = parser.parse_args()
worker = Worker(control_port=args.control_port, port=args.batch_port)
shape = worker.send_req("get_data_shape")
total = theano.shared(np.zeros(shape, "float32"), "sum", borrow=True)
worker.init_shared_params(params=[total], param_sync_rule=SumSync())
batch = T.fmatrix("batch")
updates = OrderedDict([(total, total + T.sum(batch, axis=0, dtype="float32"))])
add = theano.function(name="learn", inputs=[batch], updates=updates)

while True:
    step = worker.send_req("next")
    print("# Command received:", step, flush=True)
    if step == "train":
        for _ in range(5):
            add(np.asarray(worker.recv_mb()))
        worker.send_req("done", {"num_batches": 5})
        worker.sync_params(synchronous=True)
    if step == "stop":
        break

found = worker.shared_params[0]
np.testing.assert_array_equal(found, pixels.images().sum(axis=0))
print("The sum is exact.", flush=True)
