"""Target families, one file each: its config.json read, and the module that computes it.

A file offers `read(fields, directory) -> TargetConfig` and `make(config, max_positions) -> Target`;
`strobe.models.registry` names it once for each of its architectures.
"""
