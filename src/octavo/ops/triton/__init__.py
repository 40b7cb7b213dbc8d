"""Kernels in Triton for CUDA devices: one file per operation, each a `torch.library.custom_op` with a fake form.

Owns: the kernels, their launches and their sizes. Does not: choose a path, or keep state between steps.
Nothing outside this package imports triton: torch's CUDA wheels bring it, a CPU does without. With TRITON_INTERPRET=1
the same kernels run on CPU tensors, which is how tests compare them with their twins.
"""
