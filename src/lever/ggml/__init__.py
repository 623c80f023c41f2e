"""ggml as lever uses it: one loaded library, a backend that computes, contexts and graphs with one owner each."""

from lever.ggml.lib import VERSION, Library, load
from lever.ggml.objects import Backend, Buffer, Context, GraphAllocator

__all__ = ["VERSION", "Backend", "Buffer", "Context", "GraphAllocator", "Library", "load"]
