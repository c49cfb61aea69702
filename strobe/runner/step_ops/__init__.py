"""The operations of a step that have a kernel, apart from layers' operations (`strobe.models.ops`).

    operation         plain torch                   NumPy, on a CPU    Triton
    place             StepOps.place                 NumpyStepOps       kernels.step_bookkeeping
    accept            StepOps.accept                NumpyStepOps       kernels.step_bookkeeping
    narrow            StepOps.narrow                                   kernels.narrow
    choose            kernels.reference_narrow                         kernels.narrow
    cover             attention.recurrent_backend                      kernels.step_bookkeeping
    process           sampling.processors           (same file)        kernels.processors
    argmax            sampling.sampler              (same file)        kernels.sampling
    sample_rows       sampling.sampler              (same file)        kernels.sampling
    race_candidates   sampling.candidates                              kernels.race_candidates

`StepOps` implements every operation in plain torch and is the reference. `NumpyStepOps` and
`TritonStepOps` have the same signatures; they fall back to plain torch where they do not support a
call. An engine makes one of them, which the device's state, the sampler and the runners call.
"""
