"""gke.yaml conforms to JobSet's schema, and its policies restart the right failures."""

import copy
import json
from math import prod
from pathlib import Path

import pytest

from tests.launch import world
from txl_jax.cli import flags

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text("utf-8"))
MANIFEST = yaml.safe_load((world.ROOT / "launch/gke.yaml").read_text("utf-8"))
JOBSET = MANIFEST["spec"]
JOB = JOBSET["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]


def outcome(code: int, disrupted: bool) -> str:
    """Returns the action for the JobSet when one of its pods ends with a status.

    The controllers of Job and JobSet apply the first rule that matches.
    """
    action = "Count"
    for rule in JOB["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        conditions = {each["type"] for each in rule.get("onPodConditions", [])}
        matches = (code in codes["values"]) == (codes["operator"] == "In")
        if (disrupted and "DisruptionTarget" in conditions) or matches:
            action = rule["action"]
            break
    assert JOB["backoffLimit"] == 0, "so that a counted failure ends the Job"
    reason = {"FailJob": "PodFailurePolicy", "Count": "BackoffLimitExceeded"}[action]
    for rule in JOBSET["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.parametrize(
    "code, disrupted, action",
    [
        *((code, False, "RestartJobSet") for code in (1, 75, 134)),
        (143, True, "RestartJobSet"),
        *((code, False, "FailJobSet") for code in (2, 76, 130)),
    ],
)
def test_status_and_disruption_determine_the_restart(
    code: int, disrupted: bool, action: str
) -> None:
    assert outcome(code, disrupted) == action


def test_the_pods_fill_the_slice_and_are_not_restarted_in_place() -> None:
    assert POD["restartPolicy"] == "Never"
    selector = POD["nodeSelector"]
    topology = selector["cloud.google.com/gke-tpu-topology"]
    chips = prod(int(side) for side in topology.split("x"))
    (container,) = POD["containers"]
    for rule in JOB["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"containerName": container["name"]})
        assert codes["containerName"] == container["name"]
    resources = container["resources"]
    per_pod = resources["limits"]["google.com/tpu"]
    assert resources["requests"] == resources["limits"]
    assert JOB["parallelism"] == JOB["completions"] == chips // per_pod
    assert JOB["completionMode"] == "Indexed"
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    assert JOBSET["network"]["enableDNSHostnames"] is True


@pytest.mark.parametrize("slices", [1, 2])
def test_several_slices_need_only_another_number_of_replicas(slices: int) -> None:
    """Each has a node pool, and the streams are divisible by all chips."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    manifest = copy.deepcopy(MANIFEST)
    (slice_,) = manifest["spec"]["replicatedJobs"]
    assert slice_["replicas"] == 1
    slice_["replicas"] = slices
    jsonschema.validate(manifest, SCHEMA)
    assert manifest["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    (container,) = POD["containers"]
    per_pod = container["resources"]["limits"]["google.com/tpu"]
    chips = slices * JOB["parallelism"] * per_pod
    config = flags.parse(container["args"]).config
    assert config.train.batch_size % chips == config.eval.streams % chips == 0


def test_the_program_takes_the_flags_and_has_time_for_a_checkpoint() -> None:
    assert POD["terminationGracePeriodSeconds"] >= 300
    (container,) = POD["containers"]
    assert "command" not in container, "the image's entry point is the program"
    assert container["image"].endswith(":tpu")
    command = flags.parse(container["args"])
    assert command.mode == "train"
    assert str(command.workdir).startswith("gs://BUCKET/")
    assert "volumes" not in POD and "volumeMounts" not in container
