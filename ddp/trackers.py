"""Names for users, as `from ddp.trackers import MLflow`."""

from ddp.train.reports.trackers import CSV as CSV
from ddp.train.reports.trackers import MLflow as MLflow
from ddp.train.reports.trackers import Start as Start
from ddp.train.reports.trackers import TensorBoard as TensorBoard
from ddp.train.reports.trackers import Tracker as Tracker
from ddp.train.reports.trackers import WandB as WandB
