"""What changes parameters: learning-rate schedules (`schedules.py`). The optimizers so far are torch's own."""
