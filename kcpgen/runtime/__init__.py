"""What generated ops import, and what their users need beside them."""

from kcpgen.runtime.context_parallel import CPContext, build_cp_context

__all__ = ["CPContext", "build_cp_context"]
