"""The manifests of deploy/kubernetes: valid, complete, and without a secret in them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from enginegate.policy import read_policy
from tests.unit.deploy.rendered import KUBERNETES, OVERLAYS, rendered

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSIONS = ("1.30", "1.33")  # of Kubernetes; the oldest that vendors support, and a newer one


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request):
    return rendered(KUBERNETES / "overlays" / request.param)


def of_kind(objects, kind):
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
def test_built_in_kinds_are_valid(objects, version):
    for each in objects:
        if "." not in each["apiVersion"].split("/")[0] or each["apiVersion"].startswith("policy/"):
            kubernetes_validate.validate(each, version, strict=True)


def test_scaling_is_valid_by_the_part_of_kedas_schema_that_is_used(objects):
    schema = json.loads((Path(__file__).parent / "keda_scaledobject.json").read_text())
    (scaled,) = of_kind(objects, "ScaledObject").values()

    jsonschema.validate(scaled, schema)
    assert scaled["spec"]["scaleTargetRef"]["name"] in of_kind(objects, "Deployment")


@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_renders_the_same(name):
    """Where kubectl is installed; the renderer of these tests knows no more than it needs."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    folder = KUBERNETES / "overlays" / name
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True
    )

    def by_name(objects):
        return {(each["kind"], each["metadata"]["name"]): each for each in objects}

    assert by_name(yaml.safe_load_all(done.stdout)) == by_name(rendered(folder))


def test_everything_that_is_mounted_or_read_is_there(objects):
    """Volumes, claims and maps; a secret is made by whoever deploys."""
    claims, maps = of_kind(objects, "PersistentVolumeClaim"), of_kind(objects, "ConfigMap")
    for deployment in of_kind(objects, "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            for source in container.get("envFrom", ()):
                assert "secretRef" in source or source["configMapRef"]["name"] in maps
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps


def test_services_and_budgets_select_pods_that_exist(objects):
    labels = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(objects, "Deployment").values()
    ]
    selectors = [each["spec"]["selector"] for each in of_kind(objects, "Service").values()]
    budgets = of_kind(objects, "PodDisruptionBudget").values()
    selectors += [each["spec"]["selector"]["matchLabels"] for each in budgets]

    assert budgets
    for selector in selectors:
        assert any(selector.items() <= each.items() for each in labels), selector


def test_a_pod_is_ready_when_its_model_answers_and_follows_object_storage(objects):
    pod = of_kind(objects, "Deployment")["triton"]["spec"]["template"]["spec"]
    triton, pull = pod["containers"]

    assert triton["readinessProbe"]["httpGet"]["path"] == "/v2/models/digits/ready"
    assert "--model-control-mode=explicit" in triton["args"]
    assert pull["command"][:2] == ["enginegate", "pull"]


def test_containers_are_restricted_and_hold_no_secret(objects):
    assert not of_kind(objects, "Secret")
    for deployment in of_kind(objects, "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert ":" in container["image"].rsplit("/", 1)[-1]  # a tag, and never :latest
            assert not container["image"].endswith(":latest")
            for variable in container.get("env", ()):
                name = variable["name"].upper()
                assert not any(word in name for word in ("PASSWORD", "SECRET", "TOKEN"))


def test_the_policy_that_comes_with_it_is_valid(objects, tmp_path):
    folder = tmp_path / "policies"
    folder.mkdir()
    for name, text in of_kind(objects, "ConfigMap")["policies"]["data"].items():
        (folder / name).write_text(text)
        policy = read_policy(folder / name)

        assert policy.target.objects
        assert str(policy.target.repository) == "/models"


def test_a_gpu_is_asked_for_where_one_is_used():
    limits = {
        name: container["resources"]["limits"].get("nvidia.com/gpu")
        for name, deployment in of_kind(
            rendered(KUBERNETES / "overlays" / "nvidia"), "Deployment"
        ).items()
        for container in deployment["spec"]["template"]["spec"]["containers"][:1]
    }

    assert limits == {"triton": "1", "worker-l4": "1", "exporter": None}
