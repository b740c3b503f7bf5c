"""Operators of a running training, judged on another machine (docs/op_check_online.md)."""
