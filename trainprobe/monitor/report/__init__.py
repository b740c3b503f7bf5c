"""The report: one self-contained HTML page of a run. `run_view` is what it shows, `page` writes it."""

from trainprobe.monitor.report.page import write_page as write_page
from trainprobe.monitor.report.run_view import Metric as Metric
from trainprobe.monitor.report.run_view import RunView as RunView
from trainprobe.monitor.report.run_view import Table as Table
