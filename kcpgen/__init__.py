"""kcpgen: the equation of a linear recurrence on a matrix state in, trainable chunked kernels out."""

__version__ = "0.1.0"
