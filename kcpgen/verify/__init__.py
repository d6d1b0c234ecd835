"""Comparison of a generated op with its per-token float64 reference, as a library, a command and a GPU job.

Nothing here imports the compiler: a generated package carries all that is needed to draw its inputs.
"""
