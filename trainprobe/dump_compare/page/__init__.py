"""One self-contained HTML page of two dumps beside each other, or of one."""

from trainprobe.dump_compare.page.write import Shown as Shown
from trainprobe.dump_compare.page.write import write_page as write_page
