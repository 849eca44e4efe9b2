"""gke.yaml conforms to JobSet's schema, and its policies restart the right failures."""

import json
from math import prod
from pathlib import Path

import pytest

from tests.launch import world
from txl_jax.cli import flags
from txl_jax.errors import BAD_NUMBERS, INTERRUPTED, USER_ERROR

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text("utf-8"))
MANIFEST = yaml.safe_load((world.ROOT / "launch/gke.yaml").read_text("utf-8"))
JOBSET = MANIFEST["spec"]
JOB = JOBSET["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]


def test_only_final_statuses_of_undisrupted_pods_end_the_jobset() -> None:
    assert JOB["backoffLimit"] == 0, "so that a counted failure ends the Job"
    disrupted, final = JOB["podFailurePolicy"]["rules"]  # the first match applies
    assert disrupted["action"] == "Count"
    assert [x["type"] for x in disrupted["onPodConditions"]] == ["DisruptionTarget"]
    codes, (container,) = final["onExitCodes"], POD["containers"]
    assert (final["action"], codes["operator"]) == ("FailJob", "In")
    assert codes["values"] == [USER_ERROR, BAD_NUMBERS, INTERRUPTED]
    assert codes["containerName"] == container["name"]
    (rule,) = JOBSET["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "FailJobSet"


def test_the_pods_fill_the_slice_and_are_not_restarted_in_place() -> None:
    assert POD["restartPolicy"] == "Never"
    selector = POD["nodeSelector"]
    topology = selector["cloud.google.com/gke-tpu-topology"]
    chips = prod(int(side) for side in topology.split("x"))
    (container,) = POD["containers"]
    resources = container["resources"]
    per_pod = resources["limits"]["google.com/tpu"]
    assert resources["requests"] == resources["limits"]
    assert JOB["parallelism"] == JOB["completions"] == chips // per_pod
    assert JOB["completionMode"] == "Indexed"
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    assert JOBSET["network"]["enableDNSHostnames"] is True


def test_the_manifest_conforms_to_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MANIFEST, SCHEMA)


def test_the_program_takes_the_flags_and_has_time_for_a_checkpoint() -> None:
    assert POD["terminationGracePeriodSeconds"] >= 300
    (container,) = POD["containers"]
    assert "command" not in container, "the image's entry point is the program"
    assert container["image"].endswith(":tpu")
    command = flags.parse(container["args"])
    assert command.mode == "train"
    assert str(command.workdir).startswith("gs://BUCKET/")
    # The streams are divisible by all chips, also of two slices.
    chips = 2 * JOB["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    config = command.config
    assert config.train.batch_size % chips == config.eval.streams % chips == 0
