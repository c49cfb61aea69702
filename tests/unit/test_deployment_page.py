"""The examples in docs/deployment.md fit the commands and each other."""

from __future__ import annotations

import configparser
import re
import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from strobe.cli.flags import parse
from strobe.cli.serve import Serve
from strobe.compat.arguments import split_options
from strobe.config import EngineConfig
from strobe.server.get_endpoints import READ_ERRORS
from strobe.server.middleware import OPEN_PATHS
from strobe.server.settings import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
STOP_SECONDS = 15
"""Time that stopping takes after the grace period."""


def examples(language: str, word: str) -> str:
    """Return the example in that language that contains the word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    (example,) = [block for block in blocks if word in block]
    return example


def settings_of(words: list[str]) -> ServerConfig:
    """Parse the arguments of `strobe`, and return the server's settings."""
    own, options = split_options(words)
    assert own.pop(0) == "serve"
    command: Serve = parse(Serve, "strobe serve", own, options)
    EngineConfig(**asdict(replace(command.engine, target=command.model)))
    return ServerConfig(**asdict(command.server))


def test_kubernetes_ends_a_pod_after_the_grace_period():
    deployment, service = yaml.safe_load_all(examples("yaml", "kind: Deployment"))
    spec: Any = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = settings_of(container["args"]).grace
    assert spec["terminationGracePeriodSeconds"] >= pause + grace + STOP_SECONDS
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


def test_kubernetes_probes_need_no_key():
    deployment, _ = yaml.safe_load_all(examples("yaml", "kind: Deployment"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    paths = [container[kind]["httpGet"]["path"] for kind in kinds]
    assert set(paths) <= OPEN_PATHS
    assert ["503" in READ_ERRORS.get(path, ()) for path in paths] == [True, True, False]


def test_systemd_ends_the_service_after_the_grace_period():
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string(examples("ini", "[Service]"))
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "strobe"
    place = words.index("--config")
    settings = settings_of(words[:place] + words[place + 2 :])
    assert float(service["TimeoutStopSec"]) >= settings.grace + STOP_SECONDS


def test_serve_configuration_names_options():
    (application,) = yaml.safe_load(examples("yaml", "import_path"))["applications"]
    known = {f.name for kind in (EngineConfig, ServerConfig) for f in fields(kind)}
    assert application["args"].keys() - known == {"autoscaling_config"}
    assert application["import_path"] == "strobe.integrations.ray:app"
