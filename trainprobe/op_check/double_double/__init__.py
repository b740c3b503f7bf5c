"""Numbers of twice the digits of float64, as tensors: what results of float64 operators are judged against."""
