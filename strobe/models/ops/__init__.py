"""The operations that decoder layers and the drafter are made of.

`TorchOps` has every operation in plain torch, which is the definition of right; `TritonOps` has the
same signatures and runs kernels where these serve a call, plain torch where they do not. A model
holds one of them as `ops`, and its layers say everything through it, once.
"""
