"""What the kernels of a plan move, compute and keep, and how long a device needs for it."""
