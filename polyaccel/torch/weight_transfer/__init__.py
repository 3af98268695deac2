"""Weight transfer from a training engine to inference servers: `engine.send_weights`, and `WeightReceiver`."""

from polyaccel.torch.weight_transfer.folder import read_weights as read_weights
from polyaccel.torch.weight_transfer.receiver import WeightReceiver as WeightReceiver
from polyaccel.torch.weight_transfer.update import WeightUpdate as WeightUpdate
