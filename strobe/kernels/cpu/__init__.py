"""The operations around the products of a step on a CPU, in C: `operations.c` has them,
`library.py` compiles and loads it, and `calls.py` calls it with tensors. Their references are the
operations in plain torch (`strobe.models.ops.torch_ops`, `strobe.attention.reference`)."""
