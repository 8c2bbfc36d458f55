"""A convolutional network for digits, which makes the calls of Theano-MPI's example cifar10."""

import os
import signal
import time

import numpy as np

n_epochs = int(os.environ.get("EPOCHS", "4"))
file_batch_size = batch_size = 40
learning_rate, momentum, weight_decay = 0.1, 0.9, 0.0001


class ModelClass:
    def __init__(self, config):
        self.verbose, self.rank, self.size = config["verbose"], config["rank"], config["size"]
        self.name = "digits"

        import theano
        import theano.tensor as T
        from models.data.digits import DigitsData

        self.data = DigitsData()
        self.channels = self.data.channels
        self.input_width = self.input_height = 6
        self.batch_size, self.file_batch_size = batch_size, file_batch_size
        self.n_softmax_out = self.data.n_class

        self.data.batch_data(file_batch_size)
        self.data.extend_data(rank=self.rank, size=self.size)
        self.data.shuffle_data(mode="train", common_seed=1234)
        self.data.shuffle_data(mode="val")
        self.data.shard_data(mode="train", rank=self.rank, size=self.size)
        self.data.shard_data(mode="val", rank=self.rank, size=self.size)

        self.n_epochs, self.epoch = n_epochs, 0
        self.mu, self.eta = momentum, weight_decay
        self.use_momentum, self.use_nesterov_momentum = True, False
        self.base_lr = np.float32(learning_rate)
        self.shared_lr = theano.shared(self.base_lr)
        self.shared_x = theano.shared(
            np.zeros(
                (self.channels, self.data.width, self.data.height, file_batch_size),
                dtype=theano.config.floatX,
            ),
            borrow=True,
        )
        self.shared_y = theano.shared(np.zeros((file_batch_size,), dtype=int), borrow=True)
        self.subb_ind = subb_ind = T.iscalar("subb")
        part = slice(subb_ind * self.batch_size, (subb_ind + 1) * self.batch_size)
        self.shared_x_slice = self.shared_x[:, :, :, part]
        self.shared_y_slice = self.shared_y[part]

        self.build_model()
        self.output = self.output_layer.output
        from theanompi.models.layers2 import count_params, get_layers, get_params

        self.layers = get_layers(lastlayer=self.output_layer)
        self.params, self.weight_types = get_params(self.layers)
        count_params(self.params, self.verbose)
        self.grads = T.grad(self.cost, self.params)

        self.compiled_train_fn_list = []
        self.train_iter_fn = self.val_iter_fn = None
        self.n_subb = file_batch_size / batch_size
        self.reset_iter("train")
        self.reset_iter("val")

    def build_model(self):
        import theano.tensor as T
        from models.layers2 import FC
        from theanompi.models import layers2
        from theanompi.models.layers2 import Constant, Dropout, Normal, Softmax

        self.x, self.y, self.lr = T.ftensor4("x"), T.lvector("y"), T.scalar("lr")
        shape = self.channels, self.data.width, self.data.height, self.batch_size
        cropped = self.channels, self.input_width, self.input_height, self.batch_size
        told = {"printinfo": self.verbose}
        subtract = layers2.Subtract(
            input=self.x, input_shape=shape, subtract_arr=self.data.rawdata[4], **told
        )
        crop = layers2.Crop(input=subtract, output_shape=cropped, flag_batch=True, **told)
        shuffle = layers2.Dimshuffle(input=crop, new_axis_order=(3, 0, 1, 2), **told)
        conv = layers2.Conv(
            input=shuffle, input_shape=(cropped[-1], *cropped[:-1]), convstride=1, padsize=0,
            W=Normal((16, self.channels, 3, 3), std=0.3), b=Constant((16,), val=0), **told,
        )  # fmt: skip
        pool = layers2.Pool(input=conv, poolsize=2, poolstride=2, poolpad=0, mode="max", **told)
        flatten = layers2.Flatten(input=pool, axis=2, **told)
        W, b = Normal((flatten.output_shape[1], 64), std=0.2), Constant((64,), val=0)
        fc = FC(input=flatten, n_out=64, W=W, b=b, **told)
        dropout = Dropout(input=fc, n_out=fc.output_shape[1], prob_drop=0.1, **told)
        W = Normal((dropout.output_shape[1], self.n_softmax_out), std=0.05)
        b = Constant((self.n_softmax_out,), val=0)
        softmax = Softmax(input=dropout, n_out=self.n_softmax_out, W=W, b=b, **told)
        self.output_layer = softmax
        self.cost = softmax.negative_log_likelihood(self.y)
        self.error = softmax.errors(self.y)
        self.error_top_5 = softmax.errors_top_x(self.y)

    def compile_train(self, *args):
        import theano

        for arg_list in args:
            self.compiled_train_fn_list.append(theano.function(**arg_list))

    def compile_inference(self):
        import theano

        self.inf_fn = theano.function([self.x], self.output)

    def compile_val(self):
        import theano

        self.val_fn = theano.function(
            [self.subb_ind],
            [self.cost, self.error, self.error_top_5],
            updates=[],
            givens=[(self.x, self.shared_x_slice.astype("float32")), (self.y, self.shared_y_slice)],
        )

    def compile_iter_fns(self, sync_type="avg"):
        start = time.time()
        from theanompi.lib.opt import pre_model_iter_fn

        pre_model_iter_fn(self, sync_type=sync_type)
        if self.verbose:
            print(f"Compile time: {time.time() - start:.3f} s, for {sync_type}")

    def reset_iter(self, mode):
        if mode == "train":
            self.current_t = 0
        else:
            self.current_v = 0

    def load(self, images, labels):
        self.shared_x.set_value(np.rollaxis(images, 0, 4).astype(self.shared_x.dtype))
        self.shared_y.set_value(labels)

    def train_iter(self, count, recorder):
        if self.current_t == 0:
            self.data.shuffle_data(mode="train", common_seed=self.epoch)
            self.data.shard_data(mode="train", rank=self.rank, size=self.size)
        recorder.start()
        labels = self.data.train_labels_shard[self.current_t]
        self.load(self.data.train_img_shard[self.current_t], labels)
        recorder.end("wait")
        recorder.start()
        cost, error = self.train_iter_fn(0)
        recorder.train_error(count, cost, error)
        recorder.end("calc")
        self.current_t = (self.current_t + 1) % self.data.n_batch_train

    def val_iter(self, count, recorder):
        if self.current_v == 0:
            self.data.shuffle_data(mode="val")
            self.data.shard_data(mode="val", rank=self.rank, size=self.size)
        self.load(self.data.val_img_shard[self.current_v], self.data.val_labels_shard[self.current_v])
        from theanompi.models.layers2 import Crop, Dropout

        Dropout.SetDropoutOff()
        Crop.SetRandCropOff()
        cost, error, error_top5 = self.val_iter_fn(0)
        Dropout.SetDropoutOn()
        Crop.SetRandCropOn()
        recorder.val_error(count, cost, error, error_top5)
        self.current_v = (self.current_v + 1) % self.data.n_batch_val

    def adjust_hyperp(self, epoch):
        self.shared_lr.set_value(np.float32(self.base_lr * 0.8 ** (epoch + 1)))

    def cleanup(self):
        print(f"cleanup of rank {self.rank}, at epoch {self.epoch}")


class Scaled(ModelClass):
    """A model that scales its learning rate by the number of workers."""

    def scale_lr(self, size):
        print(f"scaled by {size}")
        self.shared_lr.set_value(np.float32(self.shared_lr.get_value() * size**0.5))


class AnyArguments(ModelClass):
    """A model as the README lists it, which takes any arguments and compiles for averages."""

    def compile_iter_fns(self, *args, **kwargs):
        super().compile_iter_fns("avg")


class Fixed(ModelClass):
    """A model of an older version, which compiles for one kind of exchange."""

    def compile_iter_fns(self):
        super().compile_iter_fns("avg")


class Failing(ModelClass):
    def train_iter(self, count, recorder):
        raise OSError("the disk is full")


class Interrupted(ModelClass):
    """A user presses Ctrl-C in the third batch."""

    def train_iter(self, count, recorder):
        super().train_iter(count, recorder)
        if count == 3 and self.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
