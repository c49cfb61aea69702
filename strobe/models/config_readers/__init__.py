"""Readers of checkpoints' config.json. Only they know its keys.

`fields` and `decoder` read what the formats share; each drafter format has a module with
`read(config, path, target) -> DraftConfig`.
"""
