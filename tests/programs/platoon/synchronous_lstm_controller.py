"""Divides the data and averages the errors, in the order of calls of Platoon's synchronous example."""

import sys

from platoon.channel import Controller


class LSTMController(Controller):
    def __init__(self, patience, epochs, default_args):
        super().__init__(**default_args)
        self.nb_worker = len(self._devices)
        self.worker_ids = dict(zip(self._workers, range(len(self._workers))))
        self.patience, self.epochs, self.errors, self.bad_counter = patience, epochs, [{}], 0
        self.best = 1.0

    def handle_control(self, req, worker_id, req_info):
        response = ""
        worker_id = self.worker_ids[worker_id]
        if req == "seed":
            response = 1234
        elif req == "splits":
            lengths = {name: length // self.nb_worker for name, length in req_info.items()}
            response = {
                name.replace("len", "splits"): [n * worker_id, n * (worker_id + 1)]
                for name, n in lengths.items()
            }
        elif req == "pred_errors":
            if worker_id in self.errors[-1]:
                raise RuntimeError("Worker got out of synch!")
            self.errors[-1][worker_id] = req_info["valid_err"]
            if len(self.errors[-1]) == self.nb_worker:
                error = sum(self.errors[-1].values()) / self.nb_worker
                self.errors.append({})
                if error <= self.best:
                    self.best, self.bad_counter, response = error, 0, "best"
                    print("Best error valid:", error, flush=True)
                else:
                    self.bad_counter += 1
        if self.bad_counter > self.patience or len(self.errors) > self.epochs:
            print("Done, best error valid:", self.best, flush=True)
            response = "stop"
            self._close()
        return response


parser = Controller.default_parser()
parser.add_argument("--patience", default=10, type=int)
parser.add_argument("--epochs", default=12, type=int)
args = parser.parse_args()
controller = LSTMController(args.patience, args.epochs, Controller.default_arguments(args))
print("Controller is ready", flush=True)
code = controller.serve()
if code != 0:
    sys.exit(code)
