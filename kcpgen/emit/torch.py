"""What is generated in torch: each function takes the value of one stage and returns files, name to text."""

from __future__ import annotations

from kcpgen.emit.eager import emit_eager
from kcpgen.emit.interface import emit_init, emit_interface
from kcpgen.emit.naive import emit_naive

__all__ = ["emit_eager", "emit_init", "emit_interface", "emit_naive"]
