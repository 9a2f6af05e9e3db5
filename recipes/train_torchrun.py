"""The same training, in processes that torchrun has started, on one host or many; and never in others.

    torchrun --standalone --nproc-per-node 4 recipes/train_torchrun.py data=digits

`torchrun --nproc-per-node 4 -m ddp train` does the same. The settings are those of recipes/train.py, but the number of
workers is torchrun's.
"""

from ddp.run.launch.torchrun import main

if __name__ == "__main__":
    main()
