"""The contestants of PyTorch in the rows of training steps: DDP on two processes, and one process.

The networks are in ``torch_networks``. They run as a user of PyTorch writes a step, without a compiled
graph, in single precision and with channels first, as Theano has them.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run step_small.py.")

import importlib.util
import re
import time

INSTALL = "python -m pip install --index-url https://download.pytorch.org/whl/cpu torch"


def is_there():
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def note():
    """Return what the notes of a row say of PyTorch."""
    if not is_there():
        return f"PyTorch is not installed; to compare with it: {INSTALL}"
    import torch

    built = torch.__config__.show()
    libraries = [
        f"{name} {' '.join(re.findall(pattern, built)) or 'missing'}"
        for name, pattern in (("MKL", r"Kernel Library Version ([\d.]+)"), ("oneDNN", r"MKL-DNN v(\S+)"))
    ]
    return (
        f"PyTorch {torch.__version__} with {' and '.join(libraries)}, not with the BLAS below: the same "
        "layers, dropout, batch and update, without a compiled graph; DDP by Gloo, with gradients in "
        "its buckets and running averages that stay with each process, as here; each process collects "
        "its own loss; malloc as it is, or with memory kept as by this library"
    )


def alone(network, data, batch, rate, momentum, threads):
    """Train in one process with this number of threads."""
    yield from _turns(network, data, batch, rate, momentum, threads)


def ddp(network, data, batch, rate, momentum, meeting, number, size):
    """Train on the rows of rank `number` of `size`, which meet by a file that is not there yet.

    They meet in the first turn, since contestants are started one after the other.
    """
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    def replicate(model):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=number, world_size=size
        )
        return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)

    yield from _turns(network, data, batch, rate, momentum, 1, replicate, number, size)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _turns(network, data, batch, rate, momentum, threads, replicate=None, number=0, size=1):
    import torch
    import torch_networks
    import training_steps

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = getattr(torch_networks, network)().train()
    images, labels = (torch.from_numpy(array) for array in data())
    arrays, each = (images, labels.long()), batch // size
    step = None

    def build():
        replica = model if replicate is None else replicate(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=rate, momentum=momentum, nesterov=True)

        def step(x, y, batch):
            start = batch.start + number * each
            x, y = x[start : start + each], y[start : start + each]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(replica(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    def turn(steps, _=False):
        nonlocal step
        step = step or build()
        before = time.process_time()
        seconds = training_steps.seconds_of_step(step, arrays, batch, steps)
        return {"seconds": seconds, "cpu": (time.process_time() - before) / (1 + steps)}

    yield turn
