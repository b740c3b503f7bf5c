"""What `trainprobe run` puts into a program that it starts."""
