"""Trackers of other projects, ready to use as callbacks of a fit, or by name on the command line."""

from ddp.train.tracker import Start as Start
from ddp.train.tracker import Tracker as Tracker
from ddp.train.trackers.csv_files import CSV as CSV
from ddp.train.trackers.ml_flow import MLflow as MLflow
from ddp.train.trackers.tensor_board import TensorBoard as TensorBoard
from ddp.train.trackers.wand_b import WandB as WandB
