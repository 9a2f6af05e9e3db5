"""Models to train: MLP, CNN, ResNets and a small GPT."""
