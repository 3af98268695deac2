"""A process that receives weights once. It prints a line when it listens, has the first tensor, and has all.

With a number in place of "all" or "stopped" it receives as often, and prints the sum of each transfer's tensors.
"""

from __future__ import annotations

import sys

import torch

from polyaccel.torch.weight_transfer import WeightReceiver


def main(address: str, out: str, how: str) -> None:
    with WeightReceiver(address) as receiver:
        print("listening", flush=True)
        if address.startswith("tcp://"):
            print(receiver.address, flush=True)  # with the port that was chosen
        if how.isdecimal():
            for _ in range(int(how)):
                print(sum(value.double().sum().item() for _, value in receiver.receive()), flush=True)
            return
        update = receiver.receive()
        found: dict[str, torch.Tensor] = {}
        for name, tensor in update:
            if not found:
                print("first", flush=True)
                if how == "stopped":
                    sys.stdin.read()  # until it is killed
            found[name] = tensor
        torch.save({"version": update.version, "tensors": found}, out)
        print("all", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
