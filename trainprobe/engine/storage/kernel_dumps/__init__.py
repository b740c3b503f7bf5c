"""Kernel-level dumps of an NPU or of MindSpore, read without CANN: what the device wrote for each kernel that it ran."""
