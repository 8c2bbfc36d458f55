"""The networks of ``step_small`` and ``step_large`` in PyTorch: the same layers, sizes and dropout."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run step_large.py.")

import torch
from torch import nn


class MnistCnn(nn.Sequential):
    """``build_cnn`` of ``demos/lasagne_mnist/network.py``."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(32 * 4 * 4, 256),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(256, 10),
        )


class Bottleneck(nn.Module):
    """``build_bottleneck`` of ``demos/resnet/network.py``, with the stride in its first convolution."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.residual = nn.Sequential(
            *_normalized(channels, width, 1, stride),
            nn.ReLU(inplace=True),
            *_normalized(width, width, 3),
            nn.ReLU(inplace=True),
            *_normalized(width, 4 * width, 1),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(*_normalized(channels, 4 * width, 1, stride))

    def forward(self, x):
        return torch.relu_(self.residual(x) + self.shortcut(x))


class ResNet50(nn.Sequential):
    """``resnet50`` of ``synkhronos.extensions.zoo``."""

    def __init__(self, classes=1000, blocks=(3, 4, 6, 3), width=64):
        layers = [*_normalized(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, length in enumerate(blocks):
            for block in range(length):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        super().__init__(*layers)


def _normalized(channels, filters, size, stride=1):
    """Return a convolution without bias, and a batch normalization."""
    convolution = nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(filters)
