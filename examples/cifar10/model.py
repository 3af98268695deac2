"""The small convolutional net of the CIFAR tutorials, after LeNet-5 (LeCun et al. 1998)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


class ConvNet(nn.Module):
    """Two convolutions, each followed by pooling, and three linear layers. For square images of `side` >= 16 pixels."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 6, kernel_size=5)
        self.second = nn.Conv2d(6, 16, kernel_size=5)
        self.pool = nn.MaxPool2d(2)
        left = ((side - 4) // 2 - 4) // 2
        self.hidden = nn.Sequential(nn.Linear(16 * left * left, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.out = nn.Linear(84, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 10) of images (batch, channels, side, side)."""
        maps = self.pool(functional.relu(self.first(images)))
        maps = self.pool(functional.relu(self.second(maps)))
        logits: Tensor = self.out(self.hidden(maps.flatten(1)))
        return logits
