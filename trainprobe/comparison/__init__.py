"""What every comparison has: a verdict with its exit code, and how it is printed and written."""
