"""Context parallelism on one device: every rank's own code run in turn, and a verdict that says where to look.

Nothing here imports the compiler: a generated package carries all that is needed.
"""
