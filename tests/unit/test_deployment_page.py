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
from strobe.server.http.bodiless_endpoints import READ_ERRORS
from strobe.server.http.middleware import OPEN_PATHS
from strobe.server.server_settings import ServerConfig

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


def ray_settings(text: str) -> ServerConfig:
    """Parse a configuration of Serve with one application, and return the server's settings."""
    (application,) = yaml.safe_load(text)["applications"]
    assert application["import_path"] == "strobe.integrations.ray:app"
    values = {name: value for name, value in application["args"].items() if name != "device"}
    engine, server = ({f.name for f in fields(kind)} for kind in (EngineConfig, ServerConfig))
    assert values.keys() - engine - server == {"autoscaling_config"}
    EngineConfig(**{name: values[name] for name in values.keys() & engine})
    settings = {name: values[name] for name in values.keys() & server if name != "api_key_file"}
    return ServerConfig(**settings)


def test_serve_configuration_names_options():
    ray_settings(examples("yaml", "\napplications:"))


def test_ray_service_ends_a_pod_after_the_grace_period():
    service = yaml.safe_load(examples("yaml", "kind: RayService"))["spec"]
    grace = ray_settings(service["serveConfigV2"]).grace
    assert yaml.safe_load(service["serveConfigV2"])["http_options"]["host"] == "0.0.0.0"
    cluster = service["rayClusterConfig"]
    (worker,) = cluster["workerGroupSpecs"]
    spec = worker["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= grace + STOP_SECONDS
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert 8000 in [port["containerPort"] for port in head["ports"]]


def test_inference_pool_reads_the_events_of_its_pods():
    container = yaml.safe_load(examples("yaml", "--kv-events-config="))
    pool = yaml.safe_load(examples("yaml", "kind: InferencePool"))["spec"]
    picker = yaml.safe_load(examples("yaml", "kind: EndpointPickerConfig"))
    settings = settings_of(container["args"])
    assert settings.kv_events is not None
    prefix, pod, model = settings.kv_events.topic.split("@")
    assert (prefix, pod, model) == ("kv", "$(POD_IP)", container["args"][1])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.kv_events.endpoint == f"tcp://*:{ports['kv-events']}"
    assert pool["targetPorts"] == [{"number": ports["http"]}]
    (scorer,) = [p for p in picker["plugins"] if p["type"] == "precise-prefix-cache-scorer"]
    parameters = scorer["parameters"]
    assert f"--page-size={parameters['tokenProcessorConfig']['blockSize']}" in container["args"]
    assert parameters["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"] == ports["kv-events"]
    deployment, _ = yaml.safe_load_all(examples("yaml", "kind: Deployment"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"] == labels
