"""The calls of Theano-MPI's example test_model: a model without a rule, in a loop of the script."""

import importlib
import sys

from theanompi.lib.helper_funcs import check_model, load_weights, save_model
from theanompi.lib.recorder import Recorder

modelfile, modelclass = sys.argv[1:]
config = {"verbose": True, "rank": 0, "size": 1}
model = getattr(importlib.import_module(modelfile), modelclass)(config)
check_model(model)
recorder = Recorder(comm=None, printFreq=640 / model.file_batch_size, modelname=modelclass, verbose=True)
model.compile_iter_fns()
count = 0
for epoch in range(model.n_epochs):
    model.epoch = epoch
    recorder.start_epoch()
    batch_i = 0
    while batch_i < model.data.n_batch_train:
        for _ in range(int(model.n_subb)):
            out = model.train_iter(batch_i, recorder)
            batch_i = batch_i + 1 if out is None else out
            count += 1
        recorder.print_train_info(batch_i)
    for _ in range(model.data.n_batch_val):
        for _ in range(int(model.n_subb)):
            model.val_iter(batch_i, recorder)
    recorder.print_val_info(batch_i)
    model.current_info = recorder.get_latest_val_info()
    model.adjust_hyperp(epoch=epoch)
    recorder.end_epoch(count, epoch)
    recorder.save(count, model.shared_lr.get_value())
    if epoch % 2 == 0:
        save_model(model, "./snapshots/", verbose=True)
model.cleanup()

trained_params = [param.get_value() for param in model.params]
other = getattr(importlib.import_module(modelfile), modelclass)(config)
for p, p_old in zip(other.params, trained_params):
    p.set_value(p_old)
other.compile_inference()
images = model.shared_x.get_value()[:, :, :, :2].astype("float32")
print("inference", other.inf_fn(images).shape)
load_weights(other.layers, "./snapshots/", 0)
print("changed since", any((a.get_value() != b).any() for a, b in zip(other.params, trained_params)))
