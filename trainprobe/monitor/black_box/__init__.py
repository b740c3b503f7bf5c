"""The last steps of each rank, kept where even a killed process leaves them, and read back with `trainprobe black-box`."""
