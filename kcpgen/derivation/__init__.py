"""From a checked spec to the algebra of one chunk: normal form, chunk form, proof."""

from kcpgen.derivation.chunk_form import ChunkForm, derive_chunk_form
from kcpgen.derivation.normal_form import NormalForm, derive_normal_form

__all__ = ["ChunkForm", "NormalForm", "derive_chunk_form", "derive_normal_form"]
