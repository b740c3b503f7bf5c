"""Planted faults in programs of other people, each with its healthy twin: what a preflight says of them first."""
