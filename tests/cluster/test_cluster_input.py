"""What can be wrong with a cluster is one sentence, said before anything is started or overwritten."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

import headway.batch
from headway.base.errors import ConnectionFailed, InvalidInput
from headway.cli.main import main
from headway.cluster.connect import cluster
from headway.cluster.prompts import owner
from headway.cluster.serve import ReplicaOptions


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
        (["--replicas", "2", "--update"], "--ray"),
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
