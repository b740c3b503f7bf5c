"""What holds on a GPU: equal bits, kernels, cost and transfers, in one command of at most eight minutes on a bare machine.

`make gpu-bundle` collects here what that machine lacks; `bash benchmarks/gpu/run.sh` installs it there and runs all parts.
"""
