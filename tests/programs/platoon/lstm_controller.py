"""Patience: says when to train, to validate and to stop, in the order of calls of Platoon's example."""

import sys

import numpy as np
from platoon.channel import Controller


class LSTMController(Controller):
    def __init__(self, max_mb, patience, valid_freq, default_args):
        super().__init__(**default_args)
        self.max_mb, self.patience, self.valid_freq = max_mb, patience, valid_freq
        self.uidx = self.bad_counter = 0
        self.errors = []
        self.valid = self._should_stop = False

    def handle_control(self, req, worker_id, req_info):
        response = ""
        if req == "next":
            if self._should_stop:
                response = "stop"
            elif self.valid:
                self.valid, response = False, "valid"
            else:
                response = "train"
        elif req == "done":
            self.uidx += req_info["train_len"]
            self.valid = np.mod(self.uidx, self.valid_freq) == 0
        elif req == "pred_errors":
            self.errors.append(req_info["valid_err"])
            if self.errors[-1] <= min(self.errors):
                self.bad_counter, response = 0, "best"
                print("Best error valid:", self.errors[-1], flush=True)
            else:
                self.bad_counter += 1
        if self.uidx > self.max_mb or self.bad_counter > self.patience:
            self._should_stop = True
        return response


parser = Controller.default_parser()
parser.add_argument("--max-mb", default=400, type=int)
parser.add_argument("--patience", default=10, type=int)
parser.add_argument("--valid-freq", default=40, type=int)
args = parser.parse_args()
controller = LSTMController(
    args.max_mb, args.patience, args.valid_freq, default_args=Controller.default_arguments(args)
)
print("Controller is ready", flush=True)
code = controller.serve()
print("best", min(controller.errors), "after", controller.uidx, flush=True)
if code != 0:
    sys.exit(code)
