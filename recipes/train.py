"""Trains a model on several workers of this machine, from one command.

    python recipes/train.py data=cifar10 model=resnet18 cluster.workers=4 batch.global_size=256
    python recipes/train.py -m cluster.workers=1,2,4              three runs, one after another
    python recipes/train.py run.name=mine resume=auto             continue runs/mine

`python -m ddp train` does the same from any folder. Below torchrun, mpirun or srun, both train in the processes that
are there. The settings: --help, or docs/settings.md. What happens: ddp/run/launch/command_line.py.
"""

from ddp.commands.train import train

if __name__ == "__main__":
    train()
