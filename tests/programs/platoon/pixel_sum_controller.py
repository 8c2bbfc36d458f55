"""A controller that sends images in minibatches, in the order of calls of Platoon's example."""

import sys
from multiprocessing import get_context

from platoon.channel import Controller

import pixels


class PixelSumController(Controller):
    def __init__(self, batch_port, images, batch_size, default_args):
        super().__init__(**default_args)
        self._batch_port, self._images, self._batch_size = batch_port, images, batch_size
        self._n_batches, self._n_done = len(images) // batch_size, 0

    def start_batch_server(self):
        self.process = get_context("fork").Process(target=self._send)
        self.process.start()

    def _send(self):
        self.init_data(self._batch_port)
        for start in range(0, len(self._images), self._batch_size):
            self.send_mb(self._images[start : start + self._batch_size])
        self.asocket.close()

    def handle_control(self, req, worker_id, req_info):
        if req == "get_data_shape":
            return self._images[0].shape
        if req == "next":
            return "train" if self._n_done < self._n_batches else "stop"
        if req == "done":
            self._n_done += req_info["num_batches"]
            print(self._n_done, "minibatches are done", flush=True)
        return ""


parser = Controller.default_parser()
parser.add_argument("--batch_port", default=5566, type=int)
parser.add_argument("--batch-size", default=50, type=int)
args = parser.parse_args()
controller = PixelSumController(
    args.batch_port, pixels.images(), args.batch_size, Controller.default_arguments(args)
)
controller.start_batch_server()
code = controller.serve()
controller.process.join()
if code != 0:
    sys.exit(code)
