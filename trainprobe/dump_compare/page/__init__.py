"""One self-contained HTML page of two dumps beside each other, or of one."""

from trainprobe.dump_compare.page.write import ShownPair as ShownPair
from trainprobe.dump_compare.page.write import write_page as write_page
