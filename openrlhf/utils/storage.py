"""Folders in S3 and compatible stores: upload with verification, download into place as a whole.

Credentials, region and endpoint come from the usual AWS settings: environment, profile or instance role, and
AWS_ENDPOINT_URL for a store that is not Amazon's. boto3 is imported only when a store is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from openrlhf.utils.atomic import atomic_dir, clean_stale

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MIB = 2**20  # bytes
PART_SIZE = 64 * MIB  # bytes; larger files are sent in parts of this size
SMALLEST_PART = 5 * MIB  # bytes, the stores' own limit
MOST_PARTS = 10_000  # the stores' own limit
RECORD_NAME = "upload.json"  # written last: every file of an upload with its size and SHA-256
# Answers that no second try changes.
_FATAL_CODES = {"400", "403", "301", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
_FATAL_CODES |= {"PermanentRedirect", "InvalidBucketName", "NoSuchKey"}


class _VerificationError(Exception):
    """What arrived in the store, or from it, differs from what was sent."""


def is_s3(path: str | Path) -> bool:
    """True for an address such as s3://bucket/folder."""
    return str(path).startswith("s3://")


def split_s3(url: str) -> tuple[str, str]:
    """(bucket, key without leading and closing slash) of an s3:// address; the key may be empty."""
    bucket, _, key = str(url).removeprefix("s3://").partition("/")
    if not is_s3(url) or len(bucket) < 3:
        raise ValueError(f"expected an address such as s3://bucket/folder, got {url!r}")
    return bucket, key.strip("/")


def check_s3_target(url: str) -> None:
    """Check before training that objects can be written under `url`, by writing and removing a small one.

    Raises:
        ValueError: no boto3, no credentials, no such bucket, or no right to write to it.
        RuntimeError: the store does not answer; found out within about 15 seconds.
    """
    bucket, key = split_s3(url)
    client = _client(attempts=2, timeout=5)
    probe = f"{key}/.write-probe-{uuid.uuid4().hex}".lstrip("/")
    _explained(url, lambda: client.put_object(Bucket=bucket, Key=probe, Body=b""))
    try:
        client.delete_object(Bucket=bucket, Key=probe)
    except Exception as error:
        logger.warning("the empty object %s stays in bucket %s: %s", probe, bucket, error)


def upload_dir(
    local: str | Path,
    url: str,
    *,
    exclude: Iterable[str] = ("wandb",),
    part_size: int = PART_SIZE,
    attempts: int = 3,
    wait: float = 2.0,
) -> int:
    """Copy every file of folder `local` under `url`, and check size and checksum of each in the store.

    `upload.json` is written last and lists the files; `download_dir` goes by it, so that an unfinished upload, or files
    of an earlier one under the same address, are never taken for the folder. Objects already there are not removed.

    Args:
        exclude: names at the top of `local` to leave out; by default the files of wandb, which has its own upload.
        part_size: bytes; a larger file is sent in parts, each retried by itself.
        attempts: tries per file after which the upload fails; `wait` seconds before the second, doubled each time.
    Returns:
        Number of files sent, `upload.json` left out.
    Raises:
        ValueError: nothing to upload, or one of the errors of `check_s3_target`.
        RuntimeError: the store failed in every try. The local folder is untouched.
    """
    bucket, key = split_s3(url)
    local = Path(local)
    left_out = {RECORD_NAME, *exclude}
    files = sorted(
        item for item in local.rglob("*") if item.is_file() and item.relative_to(local).parts[0] not in left_out
    )
    if not files:
        raise ValueError(f"expected a folder with files to upload to {url}, found none in {local}")
    client = _client()
    record = {}
    for file in files:
        name = file.relative_to(local).as_posix()
        size = file.stat().st_size
        part = _part_size(size, part_size)
        digest, etag = _digests(file, part)
        target = f"{key}/{name}".lstrip("/")
        logger.info("uploading %s (%.1f MiB) to s3://%s/%s", name, size / MIB, bucket, target)
        send = functools.partial(_send, client, file, bucket, target, part, (size, digest, etag))
        _tried(f"s3://{bucket}/{target}", send, attempts, wait)
        record[name] = {"size": size, "sha256": digest}
    body = json.dumps({"files": record}, indent=1, sort_keys=True).encode()
    last = f"{key}/{RECORD_NAME}".lstrip("/")
    _tried(url, lambda: client.put_object(Bucket=bucket, Key=last, Body=body), attempts, wait)
    return len(record)


def download_dir(url: str, local: str | Path, *, attempts: int = 3, wait: float = 2.0) -> Path:
    """Copy the objects under `url` into folder `local`, which appears (or is replaced) as a whole once all are checked.

    Raises:
        ValueError: nothing under `url`, or an upload to it that did not end.
        RuntimeError: the store failed in every one of `attempts` tries.
    """
    bucket, key = split_s3(url)
    client = _client()
    prefix = f"{key}/" if key else ""
    found = {item["Key"].removeprefix(prefix): item for item in _listed(client, url, bucket, prefix)}
    if not found:
        raise ValueError(f"expected files under {url}, found none")
    record = {}
    if RECORD_NAME in found:
        answer = _tried(url, lambda: _read(client, bucket, prefix + RECORD_NAME), attempts, wait)
        record = json.loads(answer)["files"]
        found = {name: item for name, item in found.items() if name in record}
        missing = sorted(set(record) - set(found))
        if missing:
            raise ValueError(f"the upload to {url} is incomplete: {missing} are missing; upload it again")
    with atomic_dir(local) as folder:
        for name, item in sorted(found.items()):
            target = _inside(folder, name, url)
            target.parent.mkdir(parents=True, exist_ok=True)
            receive = functools.partial(_receive, client, bucket, item, target, record.get(name))
            _tried(f"s3://{bucket}/{item['Key']}", receive, attempts, wait)
    return Path(local)


def local_copy(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """A local path as it is; for an s3:// address the path of a cached copy of that folder or single object.

    A changed folder gets a new copy: the cache is keyed by the names, sizes and ETags under the address. Processes of
    one machine wait for each other, so that one of them downloads. `cache_dir` None means $OPENRLHF_CACHE or
    ~/.cache/openrlhf.
    """
    if not is_s3(path):
        return Path(path)
    from filelock import FileLock

    url = str(path)
    bucket, key = split_s3(url)
    client = _client()
    listed = [item for item in _listed(client, url, bucket, key) if _belongs(item["Key"], key)]
    if not listed:
        raise ValueError(f"expected a folder or an object at {url}, found none")
    state = json.dumps([bucket, key, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")])
    state += json.dumps([[item["Key"], item["Size"], item["ETag"]] for item in listed])
    root = Path(cache_dir or os.environ.get("OPENRLHF_CACHE") or Path.home() / ".cache" / "openrlhf") / "s3"
    root.mkdir(parents=True, exist_ok=True)
    name = PurePosixPath(key).name or bucket
    place = root / f"{name}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    single = [item["Key"] for item in listed] == [key]
    with FileLock(root / f"{place.name}.lock"):
        if not place.exists():
            clean_stale(root)
            if single:
                with atomic_dir(place) as folder:
                    _tried(url, lambda: _receive(client, bucket, listed[0], folder / name, None), attempts=3, wait=2.0)
            else:
                download_dir(url, place)
    return place / name if single else place


def _client(attempts: int = 5, timeout: float = 10) -> Any:
    """An S3 client that gives up on one request after `attempts` tries of at most `timeout` seconds to connect."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ValueError("s3:// addresses need the boto3 package: pip install boto3") from error
    config = Config(
        connect_timeout=timeout,
        read_timeout=6 * timeout,
        retries={"mode": "standard", "total_max_attempts": attempts},
        # Checksums are verified here; the newer request headers are refused by some compatible stores.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ValueError(f"the AWS settings cannot be used: {error}") from error


def _tried(url: str, action: Callable[[], Result], attempts: int, wait: float) -> Result:
    """Result of `action`, tried again after failures that may pass; the last failure is explained."""
    for attempt in range(1, attempts + 1):
        try:
            return _explained(url, action)
        except RuntimeError as error:
            if attempt == attempts:
                raise RuntimeError(f"{error} (try {attempt} of {attempts})") from error
            pause = wait * 2 ** (attempt - 1)
            logger.warning("%s; try %d of %d failed, the next one in %.1f s", error, attempt, attempts, pause)
            time.sleep(pause)
    raise ValueError(f"expected at least 1 attempt, got {attempts}")


def _explained(url: str, action: Callable[[], Result]) -> Result:
    """Result of `action`; its failure as ValueError when trying again is useless, else as RuntimeError."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        NoCredentialsError,
    )

    try:
        return action()
    except _VerificationError as error:
        raise RuntimeError(f"{url}: {error}") from error
    except (BotoCoreError, ClientError) as error:
        cause = error
    except Boto3Error as error:  # upload_file wraps what the client raised
        cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, ClientError):
        code = cause.response.get("Error", {}).get("Code", "")
        if code in ("404", "NoSuchBucket"):
            bucket = split_s3(url)[0]
            raise ValueError(
                f"cannot use {url}: bucket {bucket!r} does not exist there ({cause}); create it, or check the address "
                "and AWS_ENDPOINT_URL"
            ) from cause
        if code in _FATAL_CODES:
            raise ValueError(
                f"cannot use {url}: {cause}; check the credentials, their rights on the bucket and AWS_REGION"
            ) from cause
    elif isinstance(cause, NoCredentialsError):
        raise ValueError(
            f"no AWS credentials for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from cause
    elif isinstance(cause, BotoCoreError) and not isinstance(
        cause, ConnectionError | HTTPClientError | IncompleteReadError
    ):
        raise ValueError(f"cannot use {url} with the AWS settings given: {cause}") from cause
    raise RuntimeError(f"the store failed for {url}: {cause}") from cause


def _send(client: Any, file: Path, bucket: str, key: str, part: int, expected: tuple[int, str, str]) -> None:
    from boto3.s3.transfer import TransferConfig

    transfer = TransferConfig(multipart_threshold=part + 1, multipart_chunksize=part, max_concurrency=4)
    client.upload_file(str(file), bucket, key, Config=transfer)
    size, digest, etag = expected
    head = client.head_object(Bucket=bucket, Key=key)
    if head["ContentLength"] != size:
        raise _VerificationError(f"{head['ContentLength']} bytes arrived of {size}")
    if head["ETag"].strip('"') == etag:
        return
    # Encrypted and some other stores have no MD5 as ETag: then only reading it back tells.
    received = hashlib.sha256()
    for block in client.get_object(Bucket=bucket, Key=key)["Body"].iter_chunks(MIB):
        received.update(block)
    if received.hexdigest() != digest:
        raise _VerificationError("the stored bytes differ from the file (SHA-256)")


def _receive(client: Any, bucket: str, item: dict[str, Any], target: Path, expected: dict[str, Any] | None) -> None:
    client.download_file(bucket, item["Key"], str(target))
    size = item["Size"] if expected is None else expected["size"]
    if target.stat().st_size != size:
        raise _VerificationError(f"{target.stat().st_size} bytes came of {size}")
    if expected is not None and _digests(target, PART_SIZE)[0] != expected["sha256"]:
        raise _VerificationError(
            "the bytes differ from those of the upload (SHA-256): it was cut short or changed later"
        )


def _read(client: Any, bucket: str, key: str) -> bytes:
    return client.get_object(Bucket=bucket, Key=key)["Body"].read()


def _listed(client: Any, url: str, bucket: str, prefix: str) -> list[dict[str, Any]]:
    """Objects whose key starts with `prefix`, without the empty folder marks that some tools write."""

    def pages() -> Iterator[dict[str, Any]]:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            yield from page.get("Contents", [])

    return [item for item in _explained(url, lambda: list(pages())) if not item["Key"].endswith("/")]


def _belongs(found: str, key: str) -> bool:
    return key == "" or found == key or found.startswith(f"{key}/")


def _inside(folder: Path, name: str, url: str) -> Path:
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
        raise ValueError(f"refusing to download {name!r} from {url}: it points outside of the folder")
    return folder / name


def _part_size(size: int, wanted: int) -> int:
    smallest = math.ceil(size / MOST_PARTS / MIB) * MIB
    return max(wanted, smallest, SMALLEST_PART)


def _digests(file: Path, part: int) -> tuple[str, str]:
    """(SHA-256, ETag that a store gives a file sent in parts of `part` bytes), both as hexadecimal text."""
    whole = hashlib.sha256()
    parts = []
    with open(file, "rb") as handle:
        while True:
            md5, left = hashlib.md5(usedforsecurity=False), part
            while left and (block := handle.read(min(MIB, left))):
                whole.update(block)
                md5.update(block)
                left -= len(block)
            if left == part and parts:
                break
            parts.append(md5)
            if left:
                break
    if len(parts) == 1:
        return whole.hexdigest(), parts[0].hexdigest()
    joined = hashlib.md5(b"".join(md5.digest() for md5 in parts), usedforsecurity=False)
    return whole.hexdigest(), f"{joined.hexdigest()}-{len(parts)}"
