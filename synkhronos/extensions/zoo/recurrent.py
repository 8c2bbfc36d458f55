"""A recurrent network of LSTM cells, for reviews or for images that it reads row by row."""

from __future__ import annotations

from typing import Any

import lasagne
import theano.tensor as tt
from lasagne.layers import DenseLayer, DimshuffleLayer, EmbeddingLayer, InputLayer, ReshapeLayer

from synkhronos.extensions.zoo import data
from synkhronos.extensions.zoo.layers import Layer, MaskedMeanLayer, MaskLayer, image_input, scaled
from synkhronos.extensions.zoo.model import Model


def lstm(
    pixels: int | None = None,
    classes: int = 2,
    width: float = 1.0,
    channels: int = 1,
    input: Any = None,
    words: int = 10_000,
) -> tuple[Layer, Any]:
    """Return the network of the Deep Learning Tutorials for the sentiment of reviews, and its input.

    A vector for each word, LSTM cells without peepholes, the mean of their outputs over the words, and a
    softmax. 1,411,842 parameters with 10,000 words and 128 cells, as in the tutorial. With `pixels`, the
    cells read the rows of an image instead, from the top.

    P. L. Carrier and K. Cho, "LSTM Networks for Sentiment Analysis",
    http://deeplearning.net/tutorial/lstm.html; the cells are those of S. Hochreiter and J. Schmidhuber,
    "Long Short-Term Memory", 1997, with the forget gate of F. Gers et al., 2000.

    Parameters
    ----------
    pixels : int, optional
        Height and width of an image; by default the input are reviews.
    classes : int
        The number of outputs, which are probabilities.
    width : float
        A factor for the 128 cells.
    channels : int
        With `pixels`: the number of colors.
    input : tensor, optional
        An expression to be used as input; by default a new variable.
    words : int
        Without `pixels`: how many numbers of words there are. 0 is padding.

    Returns
    -------
    network : lasagne.layers.Layer
        The output layer.
    input : variable
        int32 numbers of words: rows, times; or images: rows, channels, height, width.
    """
    cells = scaled(128, width)
    if pixels is None:
        input = tt.imatrix("words") if input is None else input
        layer = InputLayer((None, None), input)
        mask = MaskLayer(layer)
        vectors = EmbeddingLayer(layer, words, cells, W=lasagne.init.Uniform(0.01))
        outputs = MaskedMeanLayer(_cells(vectors, cells, mask), mask)
    else:
        layer, input = image_input("lstm", pixels, channels, input)
        layer = DimshuffleLayer(layer, (0, 2, 1, 3))  # the height is the time
        outputs = _cells(ReshapeLayer(layer, ([0], pixels, channels * pixels)), cells)
        outputs = lasagne.layers.SliceLayer(outputs, -1, axis=1)
    return DenseLayer(outputs, classes, nonlinearity=lasagne.nonlinearities.softmax), input


def _cells(layer: Layer, cells: int, mask: Layer | None = None) -> Layer:
    gate, candidate = (
        lasagne.layers.Gate(W_in=lasagne.init.Orthogonal(), W_hid=lasagne.init.Orthogonal(), W_cell=None,
                            nonlinearity=item, b=lasagne.init.Constant(0))
        for item in (lasagne.nonlinearities.sigmoid, lasagne.nonlinearities.tanh)
    )  # fmt: skip
    forget = lasagne.layers.Gate(
        W_in=lasagne.init.Orthogonal(),
        W_hid=lasagne.init.Orthogonal(),
        b=lasagne.init.Constant(1),  # at first, nothing is forgotten
    )
    return lasagne.layers.LSTMLayer(
        layer,
        cells,
        ingate=gate,
        forgetgate=forget,
        cell=candidate,
        outgate=gate,
        peepholes=False,
        mask_input=mask,
    )


class LSTM(Model):
    """The LSTM with Adam, on reviews in the folder `folder`, or on the rows of digits without it.

    The options ``words`` and ``length`` are the size of the vocabulary, and the most words of a review
    that are read.
    """

    defaults = {
        **Model.defaults,
        "pixels": None,
        "batch_size": 16,
        "n_epochs": 100,
        "update_rule": "adam",
        "learning_rate": 0.001,
        "lr_epochs": (),
        "words": 10_000,
        "length": 100,
    }
    network = staticmethod(lstm)

    def read_data(self) -> data.DataSet:
        """Return the reviews in a folder, or else scikit-learn's digits."""
        if self.options["folder"] is None:
            return data.digits()
        return data.reviews(self.options["folder"], self.options["words"], self.options["length"])

    def network_options(self) -> dict[str, Any]:
        options = super().network_options()
        if self.dataset.channels is None:
            return {**options, "pixels": None, "channels": 1, "words": self.dataset.n_words}
        return {**options, "pixels": options["pixels"] or self.dataset.pixels}
