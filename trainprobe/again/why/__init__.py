"""What is wrong with a run, asked of all that it left on disk."""
