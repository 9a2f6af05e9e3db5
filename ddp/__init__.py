"""`ddp`: data-parallel training, by hand. (lazy public face comes here)"""
