"""The structure of an MPIJob, ``kubeflow.org/v2beta1`` of MPI operator 0.5 and newer, as a JSON Schema.

It has the properties that ``demos/clusters/mpijob.yaml`` may use, with their types. The operator's own
schema ignores other properties; here they are errors, so that a misspelt name is found.
"""

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_COUNT = {"type": "integer", "minimum": 0}
_QUANTITY = {
    "anyOf": [
        {"type": "integer"},
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"},
    ]
}


def _object(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


def _list_of(item):
    return {"type": "array", "items": item, "minItems": 1}


_RESOURCES = {"cpu": _QUANTITY, "memory": _QUANTITY, "nvidia.com/gpu": _QUANTITY}
_CONTAINER = _object(
    ["name", "image"],  # the image is needed unless something else inserts it
    name=_TEXT,
    image=_TEXT,
    command=_TEXTS,
    args=_TEXTS,
    env=_list_of(_object(["name"], name=_TEXT, value=_TEXT)),
    securityContext=_object(runAsUser=_COUNT),
    readinessProbe=_object(tcpSocket=_object(["port"], port=_COUNT)),
    resources=_object(limits=_object(**_RESOURCES), requests=_object(**_RESOURCES)),
)
_REPLICAS = _object(
    replicas=_COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_object(
        metadata=_object(labels={"type": "object", "additionalProperties": _TEXT}),
        spec=_object(["containers"], containers=_list_of(_CONTAINER)),
    ),
)
SCHEMA = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=_object(["name"], name=_TEXT, namespace=_TEXT),
    spec=_object(
        ["mpiReplicaSpecs"],
        slotsPerWorker=_COUNT,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        runLauncherAsWorker={"type": "boolean"},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        sshAuthMountPath=_TEXT,
        runPolicy=_object(
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            ttlSecondsAfterFinished=_COUNT,
            activeDeadlineSeconds=_COUNT,
            backoffLimit=_COUNT,
            suspend={"type": "boolean"},
        ),
        mpiReplicaSpecs=_object(["Launcher", "Worker"], Launcher=_REPLICAS, Worker=_REPLICAS),
    ),
)
