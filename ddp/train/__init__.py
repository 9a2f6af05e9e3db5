"""The loop: `fit.py` (all of it, in pseudocode at the top), `step.py` (one step), `evaluate.py`, `checkpoint.py`.

State stands apart from the loop (`state.py`); what only watches is a callback (`callbacks.py`, `progress.py`).
"""
