"""`trainprobe self-test`: does everything that the tool claims hold on this machine's device? One command, one file to send."""
