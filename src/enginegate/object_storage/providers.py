"""The kinds of object storage: how each is reached, what its conditions are on, and remedies."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Backend

_CONNECT_S, _SILENT_S = 5, 60
# The library repeats a request this often, within about half a second: more would keep a rollback
# waiting for storage that is away.
_RETRIES = 3

OBJECT_URL = r"^(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9.-]{1,61}[A-Za-z0-9](/[\w.-]+)*$"
"""Of a policy or an environment variable; GCS's underscores in a bucket's name are left out."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One kind of object storage.

    Attributes:
        name: as its vendor calls it.
        extra: what to install for it.
        connect: opens the prefix of an address, lazily.
        tag: the field of an object's metadata that a conditional replacement needs.
        remedies: part of an error's text -> what to do.
    """

    name: str
    extra: str
    connect: Callable[[str, str], "Backend"]
    tag: Literal["e_tag", "version"]
    remedies: Mapping[str, str]


def _connect_s3(bucket: str, prefix: str) -> "Backend":
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    from obstore.store import S3Store  # noqa: PLC0415

    endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return S3Store(
        bucket,
        prefix=prefix or None,
        config={"endpoint": endpoint} if endpoint else {},
        credential_provider=Boto3CredentialProvider(),
        client_options=_client_options(endpoint, "AWS_CA_BUNDLE"),
        retry_config=_retries(),
    )


def _connect_gcs(bucket: str, prefix: str) -> "Backend":
    from obstore.store import GCSStore  # noqa: PLC0415

    return GCSStore(
        bucket,
        prefix=prefix or None,
        client_options=_client_options(_first("GOOGLE_BASE_URL"), "SSL_CERT_FILE"),
        retry_config=_retries(),
    )


def _connect_azure(container: str, prefix: str) -> "Backend":
    from obstore.store import AzureStore  # noqa: PLC0415

    endpoint = _first("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    return AzureStore(
        container,
        prefix=prefix or None,
        client_options=_client_options(endpoint, "SSL_CERT_FILE"),
        retry_config=_retries(),
    )


def _first(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _client_options(endpoint: str, authority: str) -> "ClientConfig":
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": f"{_CONNECT_S}s",
        "read_timeout": f"{_SILENT_S}s",
        "timeout": "1day",  # of a whole transfer, however large; silence ends it much earlier
    }
    if path := os.environ.get(authority):
        options["root_certificate"] = Path(path).read_bytes()
    return options


def _retries() -> "RetryConfig":
    return {"max_retries": _RETRIES}


_AWAY = "names a server that runs."
_RIGHTS = "Allow these credentials to list, read, write and delete below this prefix."
_NO_CONTAINER = "Make the {0}, or name another one as target.objects in the policy."
PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        "s3": Provider(
            "S3",
            "s3",
            _connect_s3,
            "e_tag",
            {
                "get_credentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "(or AWS_PROFILE).",
                "artial credentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, both of "
                "them.",
                "NoSuchBucket": _NO_CONTAINER.format("bucket"),
                "error sending request": f"Check that AWS_ENDPOINT_URL {_AWAY}",
                "AccessDenied": _RIGHTS,
                "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID.",
                "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY.",
                "redirect": "Set AWS_DEFAULT_REGION to the bucket's region.",
                "AuthorizationHeaderMalformed": "Set AWS_DEFAULT_REGION to the bucket's region.",
            },
        ),
        "gs": Provider(
            "Google Cloud Storage",
            "gcs",
            _connect_gcs,
            # Its conditions are on generations, which only this field holds.
            "version",
            {
                "specified bucket does not exist": _NO_CONTAINER.format("bucket"),
                "NoSuchBucket": _NO_CONTAINER.format("bucket"),
                "metadata": "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's file, or "
                "run where a service account is attached.",
                "error sending request": f"Check the network, and that GOOGLE_BASE_URL, if it is "
                f"set, {_AWAY}",
                "AccessDenied": _RIGHTS,
                "Unauthorized": "Check GOOGLE_APPLICATION_CREDENTIALS.",
            },
        ),
        "az": Provider(
            "Azure Blob Storage",
            "azure",
            _connect_azure,
            "e_tag",
            {
                "Account must be specified": "Set AZURE_STORAGE_ACCOUNT_NAME.",
                "ContainerNotFound": _NO_CONTAINER.format("container"),
                "AuthenticationFailed": "Check AZURE_STORAGE_ACCOUNT_KEY, or the identity that "
                "this process runs as.",
                "AuthorizationFailure": f"Check AZURE_STORAGE_ACCOUNT_KEY. {_RIGHTS}",
                "AuthorizationPermissionMismatch": _RIGHTS,
                "error sending request": "Check AZURE_STORAGE_ACCOUNT_NAME, and that "
                f"AZURE_STORAGE_ENDPOINT, if it is set, {_AWAY}",
            },
        ),
    }
)
