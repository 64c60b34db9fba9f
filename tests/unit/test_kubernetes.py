"""The manifests for Kubernetes: valid by its published schemas, one with the other, and by what a rank takes."""

from pathlib import Path

import pytest
import yaml

from hvdtrain.cli.train import parse
from hvdtrain.runtime.failures import EXIT_USER_ERROR
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.stopping import EXIT_REQUEUE

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
SERVICE, JOB = yaml.safe_load_all((FOLDER / "indexed-job-gloo.yaml").read_text())
MPI_JOB = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
LAUNCHER, WORKER = (MPI_JOB["spec"]["mpiReplicaSpecs"][each]["template"]["spec"] for each in ("Launcher", "Worker"))
VERSIONS = ["1.31", "1.37"]
"""The first that the comments promise, and the newest of the validator."""

PUBLISHED = {
    (): {"apiVersion", "kind", "metadata", "spec", "status"},
    ("spec",): {"slotsPerWorker", "sshAuthMountPath", "runPolicy", "mpiReplicaSpecs", "mpiImplementation"}
    | {"launcherCreationPolicy", "runLauncherAsWorker", "waitForWorkers"},
    ("spec", "runPolicy"): {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "schedulingPolicy", "suspend"}
    | {"ttlSecondsAfterFinished", "managedBy"},
    ("spec", "mpiReplicaSpecs"): {"Launcher", "Worker"},
    ("spec", "mpiReplicaSpecs", "Launcher"): {"replicas", "restartPolicy", "template"},
    ("spec", "mpiReplicaSpecs", "Worker"): {"replicas", "restartPolicy", "template"},
}
"""The fields of an MPIJob, v2beta1, in the operator's own definition of the resource."""


def validate(manifest, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", [SERVICE, JOB], ids=["Service", "Job"])
def test_the_indexed_job_is_valid(manifest, version):
    validate(manifest, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pod", [LAUNCHER, WORKER], ids=["Launcher", "Worker"])
def test_the_pods_of_the_mpi_job_are_valid(pod, version):
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}, version)


def test_a_field_that_does_not_exist_would_be_found():
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({**JOB, "spec": {**JOB["spec"], "completionmode": "Indexed"}}, "1.31")


def test_the_mpi_job_has_no_other_fields_than_its_operator_knows():
    assert (MPI_JOB["apiVersion"], MPI_JOB["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    for path, fields in PUBLISHED.items():
        part = MPI_JOB
        for name in path:
            part = part[name]
        assert part.keys() <= fields, path


def environment_of(pod, index):
    """What Kubernetes puts into the environment of a pod with this index."""
    given = {each["name"]: each.get("value", "from elsewhere") for each in pod["containers"][0]["env"]}
    return given | {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{JOB['metadata']['name']}-{index}"}


def test_each_pod_of_the_indexed_job_is_a_rank_that_finds_rank_0():
    size = JOB["spec"]["completions"]
    assert JOB["spec"]["parallelism"] == size, "all must run at once"
    places = [detect_environment(environment_of(POD, index)) for index in range(size)]
    assert [(place.rank, place.size, place.controller) for place in places] == [(i, size, "gloo") for i in range(size)]
    assert {place.hosts[0] for place in places} == {f"{JOB['metadata']['name']}-0"}
    assert POD["subdomain"] == SERVICE["metadata"]["name"], "so that pods have names"
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}


def test_exit_codes_are_those_of_a_rank():
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    by_code = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert by_code == {"Ignore": [EXIT_REQUEUE], "FailJob": [EXIT_USER_ERROR]}
    assert POD["restartPolicy"] == "Never", "what podFailurePolicy takes"
    assert JOB["spec"]["backoffLimit"] == 3 * JOB["spec"]["completions"]


def arguments_of(container):
    words = [*container["command"], *container["args"]]
    return words[words.index("hvdtrain") + 1 :]


@pytest.mark.parametrize("pod", [POD, LAUNCHER], ids=["Indexed Job", "MPIJob"])
def test_ranks_take_the_arguments_and_save_before_they_are_killed(pod):
    request = parse(arguments_of(pod["containers"][0]))
    assert request.config.recipe == "digits"
    assert request.config.checkpoint.grace_seconds < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("pod", [POD, WORKER], ids=["Indexed Job", "MPIJob"])
def test_ranks_have_memory_to_share_and_the_runs_folder(pod):
    mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounted["/runs"]]
