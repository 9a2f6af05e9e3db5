"""Names for users, as `from ddp.trackers import MLflow`."""

from ddp.train.reports.tracker import Start as Start
from ddp.train.reports.tracker import Tracker as Tracker
from ddp.train.trackers.csv import CSV as CSV
from ddp.train.trackers.mlflow import MLflow as MLflow
from ddp.train.trackers.tensorboard import TensorBoard as TensorBoard
from ddp.train.trackers.wandb import WandB as WandB
