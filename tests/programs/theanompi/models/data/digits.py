"""The small digits as images, in batches, as Theano-MPI's classes of data have them."""

import numpy as np
from models.data.utils import extend_data
from sklearn.datasets import load_digits


class DigitsData:
    def __init__(self):
        self.channels, self.width, self.height, self.n_class = 1, 8, 8, 10
        digits = load_digits()
        images = (digits.images[:, np.newaxis] / 16).astype("float32")
        mean = images.mean(axis=0)[..., np.newaxis]
        parts = [(images[:1280], digits.target[:1280]), (images[1280:1760], digits.target[1280:1760])]
        self.rawdata = [*parts[0], *parts[1], mean]

    def batch_data(self, file_batch_size):
        train_x, train_y, val_x, val_y, _ = self.rawdata
        self.train_img = split(train_x, file_batch_size)
        self.train_labels = split(train_y, file_batch_size)
        self.val_img = split(val_x, file_batch_size)
        self.val_labels = split(val_y, file_batch_size)

    def extend_data(self, rank, size):
        self.train_img_ext, self.train_labels_ext = extend_data(
            rank, size, self.train_img, self.train_labels
        )
        self.val_img_ext, self.val_labels_ext = extend_data(rank, size, self.val_img, self.val_labels)

    def shuffle_data(self, mode, common_seed=1234):
        if mode == "train":
            order = np.random.RandomState(common_seed).permutation(len(self.train_img_ext))
            self.train_img_shuffle = [self.train_img_ext[one] for one in order]
            self.train_labels_shuffle = [self.train_labels_ext[one] for one in order]
        elif mode == "val":
            self.val_img_shuffle, self.val_labels_shuffle = self.val_img_ext, self.val_labels_ext

    def shard_data(self, mode, rank, size):
        if mode == "train":
            self.train_img_shard = self.train_img_shuffle[rank::size]
            self.train_labels_shard = self.train_labels_shuffle[rank::size]
            self.n_batch_train = len(self.train_img_shard)
        elif mode == "val":
            self.val_img_shard = self.val_img_shuffle[rank::size]
            self.val_labels_shard = self.val_labels_shuffle[rank::size]
            self.n_batch_val = len(self.val_img_shard)


def split(array, rows):
    return [array[start : start + rows] for start in range(0, len(array), rows)]
