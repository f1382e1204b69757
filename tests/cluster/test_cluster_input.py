"""What can be wrong with a cluster is one sentence, said before anything is started or overwritten."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

import headway.batch
from headway.base.errors import ConnectionFailed, HeadwayError, InvalidInput
from headway.cli.flags.shared import EngineOptions
from headway.cli.main import main
from headway.cluster.batch import chunk_size, worker_places
from headway.cluster.connect import cluster
from headway.cluster.prompts import owner
from headway.cluster.replica import key_file
from headway.cluster.serve import ReplicaOptions, settled
from headway.server.keys import ApiKeys, add_key


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "one"}) + "\n")
    return path


def test_no_cluster_at_the_address_is_said_at_once():
    with pytest.raises(ConnectionFailed, match=r"no Ray cluster at 127.0.0.1:"), cluster(f"127.0.0.1:{closed_port()}"):
        pass


@pytest.mark.parametrize("address", ["nowhere:port", ":6379", "a:b:c"])
def test_a_bad_address_is_refused(address: str):
    with pytest.raises((InvalidInput, ConnectionFailed), match="Ray"), cluster(address):
        pass


def test_a_job_without_its_cluster_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConnectionFailed):
        headway.batch.run(rows(tmp_path), tmp_path / "out", ray=f"127.0.0.1:{closed_port()}")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_of_another_job_stays_as_it_is(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="not a batch job's"):
        headway.batch.run(rows(tmp_path), tmp_path / "out", ray="local")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_workers_need_a_cluster(tmp_path: Path):
    with pytest.raises(InvalidInput, match="Ray cluster"):
        headway.batch.run(rows(tmp_path), tmp_path / "out", workers=2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-replicas", "2"], "--replicas N"),
        (["--ray", "auto"], "--replicas N"),
        (["--routing", "round_robin"], "--replicas N"),
        (["--app", "mine"], "--replicas N"),
        (["--replicas", "2", "--update"], "--ray"),
        (["--replicas", "2", "--target-requests", "4"], "--max-replicas N"),
        (["--replicas", "2", "--max-replicas", "4", "--scale-down-after", "-1"], "scale_down_after is -1.0"),
        (["--replicas", "0"], "replicas"),
        (["--replicas", "2", "--max-replicas", "1"], "max_replicas"),
        (["--replicas", "2", "--session-socket", "x"], "--session-socket"),
        (["--replicas", "2", "--allow-programs"], "--allow-programs"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_cluster_that_is_started_here_has_a_place_for_every_replica():
    from headway.cluster.serve import _cpus_here

    many = 2 * (os.cpu_count() or 1)
    assert _cpus_here(ReplicaOptions(1, cpus=0.5)) is None  # as Ray counts them
    assert _cpus_here(ReplicaOptions(many)) == many
    assert _cpus_here(ReplicaOptions(1, max_replicas=many, devices=2)) == 2 * many


def test_several_devices_are_a_placement_group_on_one_node():
    from headway.cluster.serve import _resources

    made = _resources(ReplicaOptions(2, cpus=1, gpus=1, devices=4))
    assert made["placement_group_bundles"] == [{"CPU": 4, "GPU": 4}]
    assert made["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 4}
    assert made["placement_group_strategy"] == "STRICT_PACK"


def test_a_worker_of_a_job_takes_a_place_for_every_rank():
    two, four = {"CPU": 8.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 4.0}
    assert worker_places({}, [two, four]) == ({"num_cpus": 0.5, "num_gpus": 1}, 6)
    assert worker_places({"tensor_parallel": 2}, [two, four]) == ({"num_cpus": 2, "num_gpus": 2}, 3)
    assert worker_places({"tensor_parallel": 4}, [two, four]) == ({"num_cpus": 4, "num_gpus": 4}, 1)
    assert worker_places({"tensor_parallel": 4, "device": "cpu", "threads": 1}, [two, four]) == ({"num_cpus": 4}, 2)
    assert worker_places({"threads": 8, "tensor_parallel": 2}, [{"CPU": 8.0}]) == ({"num_cpus": 8}, 1)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"tensor_parallel": 8}, "tensor_parallel is 8, and no node of the cluster has more than 4 GPUs"),
        ({"threads": 32, "device": "cpu"}, r"takes 32 CPUs .* no node of the cluster has more than 16"),
        ({"tensor_parallel": "2"}, "tensor_parallel"),
    ],
)
def test_a_worker_that_fits_on_no_node_is_refused_and_not_waited_for(engine: dict[str, object], said: str):
    with pytest.raises(HeadwayError, match=said):
        worker_places(engine, [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 4.0}])


@pytest.mark.parametrize(
    ("rows", "concurrency", "workers", "size"),
    [
        (0, 128, 2, 1),
        (100_000, 128, 2, 128),  # an engine is full
        (100_000, 4096, 2, 512),
        (200, 128, 8, 25),  # every worker has some
        (3, 128, 8, 1),
        (10_000_000, 128, 100, 500),
        (100_000_000, 1, 1, 5000),
    ],
)
def test_chunks_fill_an_engine_and_are_not_too_many(rows: int, concurrency: int, workers: int, size: int):
    assert chunk_size(rows, concurrency, workers) == size
    assert -(-rows // size) <= 20_000


def test_replicas_have_a_gpu_each_where_nobody_chose_a_device():
    from headway.cli.serve.command import _resources

    gpus = {device: _resources(EngineOptions(device=device))["gpus"] for device in ("auto", "cuda", "cpu")}
    assert gpus == {"auto": None, "cuda": 1.0, "cpu": 0.0}
    for given, has, gpus in ((None, {"GPU": 2.0}, 1.0), (None, {"CPU": 2.0}, 0.0), (0.0, {"GPU": 2.0}, 0.0)):
        assert settled(ReplicaOptions(2, gpus=given), has).gpus == gpus


@pytest.mark.slow
def test_a_machine_with_too_few_gpus_is_refused_and_not_waited_for(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--replicas", "2", "--device", "cuda", "--port", "0"])
    assert ended.value.code == 2
    assert "this machine has only 0 of 2 GPUs; use fewer replicas, or --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("threads", "cpus"), [(None, 1), (4, 2), (1, 1)])
def test_ranks_of_a_replica_share_its_threads(threads: int | None, cpus: float):
    from headway.cli.serve.command import _resources

    options = EngineOptions(device="cpu", threads=threads, tensor_parallel=2)
    assert _resources(options) == {"cpus": cpus, "gpus": 0.0, "devices": 2}


def test_the_keys_of_a_replica_are_in_a_file_only_while_they_are_read(tmp_path: Path):
    secret = add_key(tmp_path / "keys.json", "ann")
    with key_file((tmp_path / "keys.json").read_text()) as path:
        assert path is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        tenant = ApiKeys.read(path).find(secret)
    assert tenant is not None
    assert tenant.name == "ann"
    assert not path.exists()
    with key_file(None) as none:
        assert none is None


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("resp_d7ictu1p-0123abcd", "d7ictu1p"),
        ("conv_d7ictu1p-0123abcd", "d7ictu1p"),
        ("d7ictu1p-Ab_C-", "d7ictu1p"),
        ("resp_0123abcd", None),
        (7, None),
        (None, None),
    ],
)
def test_an_id_names_the_replica_that_has_it(id: object, name: str | None):
    assert owner(id) == name
