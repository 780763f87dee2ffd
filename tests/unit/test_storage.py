"""Upload to and download from a local S3 server, also one that fails, corrupts or is not there."""

import io
import json
import socket
import threading
import time

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from openrlhf.utils import storage
from openrlhf.utils.storage import check_s3_target, download_dir, is_s3, local_copy, split_s3, upload_dir

MIB = 2**20


class Store:
    """A moto server; `fault`, when set, sees each request first and may answer it (bytes status) or change its body."""

    def __init__(self):
        self.fault = None
        self.requests = []
        application = DomainDispatcherApplication(create_backend_app)

        def answer(environ, start_response):
            request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
            self.requests.append(request)
            status = self.fault(request, environ) if self.fault else None
            if status is not None:
                start_response(status, [("Content-Type", "application/xml")])
                return [b""]
            return application(environ, start_response)

        self.server = make_server("127.0.0.1", 0, answer, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def running_store():
    store = Store()
    yield store
    store.close()


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """Settings that reach no real account, whatever the machine has."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    return monkeypatch


@pytest.fixture
def store(running_store, aws):
    aws.setenv("AWS_ENDPOINT_URL", running_store.url)
    running_store.fault = None
    boto3.client("s3").create_bucket(Bucket="models")
    yield running_store
    running_store.fault = None
    bucket = boto3.resource("s3").Bucket("models")
    bucket.objects.all().delete()
    bucket.delete()
    running_store.requests.clear()


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "config.json").write_text('{"a": 1}')
    (source / "empty").write_text("")
    (source / "sub" / "wéights 1.bin").write_bytes(bytes(range(256)) * 8)
    return source


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def keys():
    return sorted(item.key for item in boto3.resource("s3").Bucket("models").objects.all())


def test_addresses():
    assert is_s3("s3://bucket/a") and not is_s3("/tmp/s3") and not is_s3("s3:/bucket")
    assert split_s3("s3://bucket/a/b/") == ("bucket", "a/b")
    assert split_s3("s3://bucket") == ("bucket", "")
    for url in ("s3://", "s3:///key", "/local", "https://host/bucket"):
        with pytest.raises(ValueError, match="s3://bucket/folder"):
            split_s3(url)


def test_upload_and_download_give_the_same_folder(store, folder, tmp_path):
    (folder / "wandb").mkdir()
    (folder / "wandb" / "debug.log").write_text("x")
    assert upload_dir(folder, "s3://models/run/one/") == 3
    assert keys() == [
        "run/one/config.json", "run/one/empty", "run/one/sub/wéights 1.bin", "run/one/upload.json",
    ]  # fmt: skip
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "of an earlier model").write_text("x")
    download_dir("s3://models/run/one", tmp_path / "copy")
    (folder / "wandb" / "debug.log").unlink()
    assert contents(tmp_path / "copy") == contents(folder)


def test_a_large_file_goes_in_parts(store, folder, tmp_path):
    # 11 MiB in parts of 5 MiB (the smallest allowed): three parts; exactly 5 MiB: one plain request.
    (folder / "large.bin").write_bytes(bytes(range(256)) * (11 * MIB // 256))
    (folder / "one part.bin").write_bytes(b"x" * (5 * MIB))
    upload_dir(folder, "s3://models/run", part_size=1)
    parts = [request for request in store.requests if "partNumber=" in request]
    assert len(parts) == 3 and all("large.bin" in request for request in parts)
    assert not any(request.startswith("GET") for request in store.requests), "the ETag was enough to verify"
    download_dir("s3://models/run", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)


def test_more_parts_than_allowed_make_larger_parts():
    assert storage._part_size(64 * MIB, 64 * MIB) == 64 * MIB
    # 1 TiB in 10,000 parts: 104.86 MiB, rounded up to whole MiB
    assert storage._part_size(2**40, 64 * MIB) == 105 * MIB


def test_a_first_failing_request_is_repeated(store, folder, tmp_path):
    failures = []

    def fault(request, environ):
        if request.startswith("PUT") and len(failures) < 2:
            failures.append(request)
            return "503 Slow Down"
        return None

    store.fault = fault
    upload_dir(folder, "s3://models/run")
    assert len(failures) == 2
    download_dir("s3://models/run", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)


def corrupt(environ):
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    environ["wsgi.input"] = io.BytesIO(body[:-1] + bytes([body[-1] ^ 1]))


def test_bytes_changed_on_the_way_are_noticed_and_sent_again(store, folder):
    corrupted = []

    def fault(request, environ):
        if request.startswith("PUT") and "config.json" in request and len(corrupted) < 1:
            corrupted.append(request)
            corrupt(environ)

    store.fault = fault
    upload_dir(folder, "s3://models/run", wait=0)
    assert len(corrupted) == 1
    assert boto3.resource("s3").Object("models", "run/config.json").get()["Body"].read() == b'{"a": 1}'


def test_bytes_changed_every_time_fail_the_upload_and_leave_no_record(store, folder):
    store.fault = lambda request, environ: corrupt(environ) if "PUT" in request and "config.json" in request else None
    with pytest.raises(RuntimeError, match=r"s3://models/run/config.json.*SHA-256.*try 3 of 3"):
        upload_dir(folder, "s3://models/run", wait=0)
    assert "run/upload.json" not in keys()


def test_a_store_whose_etag_is_no_md5_is_verified_by_reading_back(store, folder, monkeypatch):
    digests = storage._digests
    monkeypatch.setattr(storage, "_digests", lambda file, part: (digests(file, part)[0], "encrypted"))
    upload_dir(folder, "s3://models/run")
    assert sum(request.startswith("GET") for request in store.requests) == 3


def test_objects_damaged_later_are_noticed_and_nothing_is_put_in_place(store, folder, tmp_path):
    upload_dir(folder, "s3://models/run")
    damaged = boto3.resource("s3").Object("models", "run/config.json")
    damaged.put(Body=b'{"a": 2}')
    with pytest.raises(RuntimeError, match="SHA-256"):
        download_dir("s3://models/run", tmp_path / "copy", wait=0)
    damaged.delete()
    with pytest.raises(ValueError, match="incomplete.*config.json"):
        download_dir("s3://models/run", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_leftovers_of_another_upload_are_not_part_of_the_folder(store, folder, tmp_path):
    bucket = boto3.resource("s3").Bucket("models")
    bucket.put_object(Key="run/model-00002-of-00002.safetensors", Body=b"old")
    upload_dir(folder, "s3://models/run")
    download_dir("s3://models/run", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(folder)


def test_a_folder_put_there_by_another_tool_is_downloaded_too(store, tmp_path):
    bucket = boto3.resource("s3").Bucket("models")
    bucket.put_object(Key="plain/", Body=b"")
    bucket.put_object(Key="plain/a/b.txt", Body=b"b")
    download_dir("s3://models/plain", tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"a/b.txt": b"b"}
    bucket.put_object(Key="plain/../../outside", Body=b"x")
    with pytest.raises(ValueError, match="outside of the folder"):
        download_dir("s3://models/plain", tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"a/b.txt": b"b"}


def test_local_copy_downloads_once_and_again_after_a_change(store, folder, tmp_path):
    assert local_copy("/some/path").as_posix() == "/some/path"
    upload_dir(folder, "s3://models/run")
    boto3.resource("s3").Bucket("models").put_object(Key="running/other", Body=b"a longer name, not ours")
    cache = tmp_path / "cache"
    first = local_copy("s3://models/run", cache)
    assert contents(first) == contents(folder)
    store.requests.clear()
    assert local_copy("s3://models/run/", cache) == first
    assert len(store.requests) == 1, "only the listing"
    (folder / "config.json").write_text('{"a": 2}')
    upload_dir(folder, "s3://models/run")
    second = local_copy("s3://models/run", cache)
    assert (second / "config.json").read_text() == '{"a": 2}'
    assert (first / "config.json").read_text() == '{"a": 1}'


def test_local_copy_of_one_object_keeps_its_name(store, tmp_path):
    boto3.resource("s3").Bucket("models").put_object(Key="data/rows.jsonl", Body=b"{}\n")
    copy = local_copy("s3://models/data/rows.jsonl", tmp_path / "cache")
    assert copy.name == "rows.jsonl" and copy.read_bytes() == b"{}\n"
    with pytest.raises(ValueError, match="s3://models/data/row"):
        local_copy("s3://models/data/row", tmp_path / "cache")


def test_the_check_before_training_leaves_nothing(store):
    check_s3_target("s3://models/run")
    check_s3_target("s3://models")
    assert keys() == []


def test_a_missing_bucket_is_named_by_every_command(store, folder, tmp_path):
    for action in (
        lambda: check_s3_target("s3://absent/run"),
        lambda: upload_dir(folder, "s3://absent/run"),
        lambda: download_dir("s3://absent/run", tmp_path / "copy"),
        lambda: local_copy("s3://absent/run", tmp_path / "cache"),
    ):
        with pytest.raises(ValueError, match="bucket 'absent' does not exist"):
            action()


def test_a_refused_write_is_told_at_once(store):
    store.fault = lambda request, environ: "403 Forbidden" if request.startswith("PUT") else None
    with pytest.raises(ValueError, match=r"s3://models/run.*rights on the bucket"):
        check_s3_target("s3://models/run")
    assert len(store.requests) == 2  # the fixture's bucket, and one try


def test_missing_credentials_say_what_to_set(store, aws):
    with aws.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        without.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID"):
            check_s3_target("s3://models/run")
        without.setenv("AWS_PROFILE", "absent")
        with pytest.raises(ValueError, match="absent"):
            check_s3_target("s3://models/run")


def test_a_bad_bucket_name_is_told_at_once(store):
    with pytest.raises(ValueError, match="Invalid bucket name"):
        check_s3_target("s3://no_UPPER case/run")


def test_a_dead_endpoint_is_named_within_bounded_time(aws, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    aws.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}"):
        check_s3_target("s3://models/run")
    assert time.monotonic() - start < 15


def test_an_endpoint_that_never_answers_ends_the_check(aws, monkeypatch):
    client = storage._client
    monkeypatch.setattr(storage, "_client", lambda attempts, timeout: client(attempts, timeout=timeout / 50))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        aws.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="[Tt]imeout"):
            check_s3_target("s3://models/run")
        assert time.monotonic() - start < 10  # 2 tries of 0.6 s to read, and the wait between them


def test_an_empty_folder_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="found none"):
        upload_dir(tmp_path / "nothing", "s3://models/run")
    with pytest.raises(ValueError, match="found none"):
        download_dir("s3://models/nothing", tmp_path / "copy")


def test_the_record_lists_sizes_and_digests(store, folder):
    upload_dir(folder, "s3://models/run")
    record = json.loads(boto3.resource("s3").Object("models", "run/upload.json").get()["Body"].read())
    # SHA-256 of no bytes
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert record["files"]["empty"] == {"size": 0, "sha256": empty}
