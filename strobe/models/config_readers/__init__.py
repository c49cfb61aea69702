"""What checkpoints' config.json look like: read and checked here, and nowhere known behind it.

`fields` and `decoder` read what most share; one file per drafter format offers
`read(config, path, target) -> DraftConfig`.
"""
