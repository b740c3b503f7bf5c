"""`trainprobe kernel-dump`: what an NPU or MindSpore wrote of single kernels, listed, compared and converted without CANN."""
