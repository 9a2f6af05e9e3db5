"""The metrics of a run as a table, for pandas or a spreadsheet: nothing has to be installed.

    RUN_DIR/metrics.csv     a row for each object of metrics.jsonl, empty where the object has no such number
            settings.csv    a row for each setting; status.csv: one row, with the reason for it
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from ddp.process.files import lines_of, to_append, write_whole
from ddp.train.reports.tracker import Start, Status, Tracker


class CSV(Tracker):
    """Writes metrics.csv, settings.csv and status.csv into the run's folder."""

    title, needs_folder = "CSV", True

    def begin(self, id: str, start: Start) -> str:
        assert start.folder is not None
        self._folder_of_run, self._path = start.folder, start.folder / "metrics.csv"
        self._columns = ["kind", "step"]
        self._write([row for row in self._rows() if int(row["step"]) <= start.step])
        return str(start.folder)

    def settings(self, values: Mapping[str, str]) -> None:
        rows = [{"name": name, "value": value} for name, value in values.items()]
        write_whole(self._folder_of_run / "settings.csv", _table(["name", "value"], rows, header=True))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step, **values}
        if row.keys() <= {*self._columns}:
            with to_append(self._path) as file:
                file.write(_table(self._columns, [row]))
        else:
            self._write([*self._rows(), row])

    def end(self, status: Status, reason: str, step: int) -> None:
        row = {"status": status, "reason": reason, "step": step}
        write_whole(self._folder_of_run / "status.csv", _table(row, [row], header=True))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        write_whole(self._path, _table(self._columns, rows, header=True))

    def _rows(self) -> list[dict[str, Any]]:
        return list(csv.DictReader(lines_of(self._path)))


def _table(columns: Iterable[str], rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
    writer = csv.DictWriter(file := io.StringIO(), list(columns), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
