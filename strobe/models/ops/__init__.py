"""The operations of decoder layers and the drafter.

`TorchOps` implements every operation in plain torch and is the reference. `TritonOps` has the same
signatures; it runs kernels where they support a call, and plain torch elsewhere. A model holds one
of them as `ops`, and its layers are written once, as calls of it.
"""
