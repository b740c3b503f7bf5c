"""A pack that anybody may have made is refused with a sentence, or read safely; it never does harm."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.config_check.made_packs import written
from trainprobe.cli import main
from trainprobe.config_check import pack_members
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.errors import CompareError, FormatError, UnsafeFile


def zip_of(path: Path, **members: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def rewritten(path: Path, name: str, text: bytes | None = None, **manifest: object) -> Path:
    """Write a pack anew with one member replaced or keys of its manifest changed."""
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    if text is not None:
        members[name] = text
    members["manifest.json"] = json.dumps({**json.loads(members["manifest.json"]), **manifest}).encode()
    out = path.with_name("changed.zip")
    with zipfile.ZipFile(out, "w") as archive:
        for n, content in members.items():
            archive.writestr(n, content)
    return out


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/outside.json", "a/../../outside.json", "..\\outside.json", "C:\\outside.json"]
)
def test_a_member_that_would_leave_its_folder_is_refused(tmp_path, name):
    with pytest.raises(UnsafeFile, match="outside its folder"):
        read_pack(zip_of(tmp_path / "pack.zip", **{name: "{}"}))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["pack.zip"]


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = zip_of(tmp_path / "pack.zip", **{"manifest.json": "0" * (64 << 20)})
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UnsafeFile, match="decompression bomb"):
        read_pack(path)


def test_a_pack_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_members, "LARGEST_PACK", 100)
    with pytest.raises(UnsafeFile, match="more than 100 are refused"):
        read_pack(written(tmp_path))


def test_a_member_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_members, "LARGEST_MEMBER", 10)
    with pytest.raises(UnsafeFile, match="unpacks to"):
        read_pack(written(tmp_path))


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    path = written(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("rank0/environment.json", "{}")
    with pytest.raises(UnsafeFile, match="twice"):
        read_pack(path)


@pytest.mark.parametrize("kept", [0, 1, 100, -30])
def test_a_truncated_pack_is_told_as_such(tmp_path, kept):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FormatError, match="not a readable zip file"):
        read_pack(path)


def test_a_file_that_is_no_zip_is_told_as_such(tmp_path):
    path = tmp_path / "pack.zip"
    path.write_text("hello")
    with pytest.raises(FormatError, match="not a readable zip file"):
        read_pack(path)


def test_every_single_damaged_byte_is_noticed_or_harmless(tmp_path):
    path = written(tmp_path)
    good = read_pack(path)
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
        try:
            again = read_pack(path)
        except FormatError:
            continue
        assert again == good


def test_a_zip_without_manifest_is_no_pack(tmp_path):
    with pytest.raises(FormatError, match="has no manifest"):
        read_pack(zip_of(tmp_path / "pack.zip", **{"readme.txt": "hi"}))


def test_a_pack_of_a_newer_version_asks_for_an_update(tmp_path):
    with pytest.raises(FormatError, match="format version 2 and this trainprobe reads up to 1: update trainprobe"):
        read_pack(rewritten(written(tmp_path), "", version=2))


@pytest.mark.parametrize("version", [None, "1", 0, True, 1.5])
def test_a_version_that_is_no_number_is_refused(tmp_path, version):
    with pytest.raises(FormatError, match="not a number"):
        read_pack(rewritten(written(tmp_path), "", version=version))


def test_hand_edited_json_is_noticed_by_its_checksum(tmp_path):
    edited = b'{"variables": {"NCCL_ALGO": "Tree"}}'
    with pytest.raises(FormatError, match="edited or damaged"):
        read_pack(rewritten(written(tmp_path), "rank0/environment.json", edited))


def test_a_member_that_was_added_is_noticed(tmp_path):
    with pytest.raises(FormatError, match="added afterwards"):
        read_pack(rewritten(written(tmp_path), "rank1/environment.json", b"{}"))


@pytest.mark.parametrize("content", [{"variables": 3}, {"variables": [1]}, {"variables": None}])
def test_content_of_another_kind_is_an_error_of_the_comparison(tmp_path, content):
    packs = [read_pack(written(tmp_path, f"{i}.zip", environment=content)) for i in range(2)]
    with pytest.raises(CompareError, match="does not have the content"):
        compare_packs(*packs)


def test_json_that_is_nested_too_deeply_is_refused(tmp_path):
    deep = ("[" * 100_000).encode()
    path = zip_of(tmp_path / "pack.zip", **{"manifest.json": deep.decode()})
    with pytest.raises(FormatError, match=r"too deeply|not JSON"):
        read_pack(path)


def test_a_folder_and_a_missing_file_are_told_apart(tmp_path):
    with pytest.raises(FormatError, match="is a folder"):
        read_pack(tmp_path)
    with pytest.raises(FormatError, match="there is no such pack"):
        read_pack(tmp_path / "none.zip")


def test_the_command_tells_a_bad_pack_in_one_sentence_with_exit_code_3(tmp_path, capsys):
    good, bad = written(tmp_path), tmp_path / "bad.zip"
    bad.write_bytes(b"PK\x03\x04 nothing")
    assert main(["config-check", "compare", str(good), str(bad)]) == 3
    assert capsys.readouterr().err.count("\n") == 1
