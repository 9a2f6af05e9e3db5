"""Sets of files against the bytes in them; indexes that are reused, renewed, refused; processes and copies."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from file_systems import EveryFifthFails, Odd
from torch.utils.data import DataLoader

from ddp.data.files import file_set
from ddp.data.files.file_set import FileSet, Format, Layout, index_files, index_path, open_index
from ddp.data.files.readers import Reader, Retries
from ddp.data.files.rows import Csv, JsonLines
from ddp.data.files.storage import DIRECT, Storage, listed
from ddp.data.files.tar_files import ImageAndClass, TarSamples
from ddp.data.sets.text_sets import TokenFiles
from ddp.errors import ConfigError, UnreadableSample

FORK = multiprocessing.get_context("fork")


class Words(Format):
    """Words between single spaces; the simplest format there is."""

    kind = "words"
    suffixes = (".words",)
    num_indexed = 0

    def __init__(self, *, upper: bool = False) -> None:
        self.upper = upper

    def settings(self) -> dict[str, Any]:
        return {"upper": self.upper}

    def index(self, reader: Reader) -> Layout:
        Words.num_indexed += 1
        words = reader.read(0, reader.facts.size).split(b" ")
        ends = np.cumsum([len(word) + 1 for word in words]) - 1
        return Layout(np.stack([ends - [len(word) for word in words], ends], axis=1), {"size": reader.facts.size})

    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        if data == b"bad":
            raise ValueError("a bad\nword")
        return (data.upper() if self.upper else data).decode(), notes["size"]

    def lengths(self, num_bytes: np.ndarray) -> np.ndarray:
        return num_bytes


class Letters(Words):
    """Every letter is a sample."""

    kind = "letters"

    def index(self, reader: Reader) -> Layout:
        starts = np.arange(reader.facts.size, dtype=np.int64)
        return Layout(np.stack([starts, starts + 1], axis=1), {"size": reader.facts.size})


def write_words(folder: Path, *, num_files: int = 5) -> list[tuple[str, int]]:
    """Writes files of words; returns all samples."""
    draw, samples = random.Random(0), []
    for number in range(num_files):
        words = ["w" * draw.randint(1, 9) + str(i) for i in range(draw.randint(1, 20))]
        text = " ".join(words)
        (folder / f"{number:03d}.words").write_text(text)
        samples += [(word, len(text)) for word in words]
    return samples


@pytest.fixture
def words(tmp_path: Path) -> FileSet:
    write_words(tmp_path)
    return FileSet(tmp_path, Words(), index_dir=tmp_path / "index")


def test_samples_are_those_of_the_files_in_their_order(tmp_path: Path) -> None:
    expected = write_words(tmp_path)
    words = FileSet(tmp_path, Words(), index_dir=tmp_path / "index")
    assert list(words) == expected  # type: ignore[call-overload]
    assert words.addresses == sorted(str(path) for path in tmp_path.glob("*.words"))
    sizes = [len((tmp_path / f"{i:03d}.words").read_text().split()) for i in range(5)]
    assert words.file_sizes.tolist() == sizes
    assert words.file_sizes.dtype == np.int64
    assert words.lengths is not None
    assert words.lengths.tolist() == [len(word) for word, _ in expected]
    with pytest.raises(IndexError):
        words[-1]
    with pytest.raises(IndexError):
        words[len(expected)]


def test_samples_of_one_length_need_no_table(tmp_path: Path) -> None:
    for name in ("abc", "defgh"):
        (tmp_path / f"{name}.words").write_text(name)
    letters = FileSet(tmp_path, Letters(), index_dir=tmp_path / "index")
    assert "".join(letter for letter, _ in letters) == "abcdefgh"  # type: ignore[attr-defined]
    assert letters.file_sizes.tolist() == [3, 5]
    assert letters.lengths is not None
    assert letters.lengths.tolist() == [1] * 8
    assert "".join(pickle.loads(pickle.dumps(letters))[i][0] for i in range(8)) == "abcdefgh"


def test_few_files_are_open_and_openings_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_set, "_NUM_OPEN", 2)
    write_words(tmp_path)
    words = FileSet(tmp_path, Words(), index_dir=tmp_path / "index")
    firsts = [0, *np.cumsum(words.file_sizes).tolist()]
    assert words.opened.cache_info().misses == 0
    before = len(list(Path("/proc/self/fd").iterdir()))
    for file in (0, 1, 0, 1, 2, 1, 0):  # 0 1 . . 2 . 0
        words[firsts[file]]
    assert words.opened.cache_info().misses == 4
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2


def test_copies_open_files_of_their_own_and_children_read_beside_their_parent(words: FileSet) -> None:
    expected = list(words)  # type: ignore[call-overload]
    assert words.lengths is not None
    copy = pickle.loads(pickle.dumps(words))
    assert copy.opened.cache_info().misses == 0
    assert list(copy) == expected
    assert copy.lengths.tolist() == words.lengths.tolist()
    queue = FORK.Queue()
    child = FORK.Process(target=lambda: [queue.put(list(words)) for _ in range(9)])  # type: ignore[call-overload]
    child.start()
    for _ in range(9):
        assert list(words) == expected  # type: ignore[call-overload]
        assert queue.get(timeout=20) == expected
    child.join()


def test_loader_processes_read_the_same_samples(words: FileSet) -> None:
    expected = list(words)  # type: ignore[call-overload]
    loader = DataLoader(words, batch_size=None, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type,var-annotated]
    assert list(map(tuple, loader)) == expected


def test_a_copy_whose_index_was_written_again_is_refused(words: FileSet, tmp_path: Path) -> None:
    frozen = pickle.dumps(words)
    (tmp_path / "000.words").write_text("other words")
    FileSet(tmp_path, Words(), index_dir=tmp_path / "index")
    with pytest.raises(ConfigError, match=r"index was removed or written again .* open it again"):
        pickle.loads(frozen)


def test_an_unreadable_sample_names_file_place_and_cause(tmp_path: Path) -> None:
    (tmp_path / "a.words").write_text("one two")
    (tmp_path / "b.words").write_text("three four bad five")
    words = FileSet(tmp_path, Words(), index_dir=tmp_path / "index")
    with pytest.raises(UnreadableSample, match=r"^\S+/b.words, sample 2, at byte 11 .*\(ValueError: a bad word\): ."):
        words[4]
    assert words[5][0] == "five"


# The index


def indexed(tmp_path: Path) -> int:
    """Returns how many files were read to index the folder."""
    before = Words.num_indexed
    index_files(tmp_path, Words(), index_dir=tmp_path / "index")
    return Words.num_indexed - before


def test_only_new_and_changed_files_are_read_again(tmp_path: Path) -> None:
    write_words(tmp_path)
    assert indexed(tmp_path) == 5
    assert indexed(tmp_path) == 0
    (tmp_path / "0005.words").write_text("a new one")  # between 000 and 001
    assert indexed(tmp_path) == 1
    text = (tmp_path / "002.words").read_text()
    (tmp_path / "002.words").write_text(text[::-1])
    os.utime(tmp_path / "002.words", ns=(1, 1))  # as if clocks were too coarse
    assert indexed(tmp_path) == 1
    (tmp_path / "001.words").unlink()
    assert indexed(tmp_path) == 0
    expected = [word for path in sorted(tmp_path.glob("*.words")) for word in path.read_text().split()]
    assert [word for word, _ in FileSet(tmp_path, Words(), index_dir=tmp_path / "index")] == expected  # type: ignore[attr-defined]
    assert indexed(tmp_path) == 0
    assert [path.suffix for path in (tmp_path / "index").iterdir()] == [".index"]


def test_a_worker_neither_reads_nor_writes(words: FileSet, tmp_path: Path) -> None:
    def contents() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "index").iterdir()}

    before = contents(), Words.num_indexed
    worker = FileSet(tmp_path, Words(), index_dir=tmp_path / "index", build=False)
    assert list(worker) == list(words)  # type: ignore[call-overload]
    assert (contents(), Words.num_indexed) == before


def test_a_file_of_the_same_size_and_time_is_another_one(tmp_path: Path) -> None:
    """As `cp --preserve` and `rsync --times` write. Whoever has the file open reads what was indexed."""
    make(tmp_path, "a.words", "b.words")
    for name in ("a.words", "b.words"):
        (tmp_path / name).write_text(f"{name[0]} 1234 {name[0]}")
        os.utime(tmp_path / name, ns=(5, 5))

    def opened(name: str) -> FileSet:
        return FileSet(tmp_path / name, Words(), index_dir=tmp_path / "index")

    before, going_on = opened("a.words"), opened("b.words")
    assert before[1] == ("1234", 8)
    (tmp_path / "new").write_text("a 12 345")  # as long, with other samples
    os.utime(tmp_path / "new", ns=(5, 5))
    (tmp_path / "new").replace(tmp_path / "a.words")
    assert before[1] == ("1234", 8)
    with pytest.raises(ConfigError, match=r"a\.words has changed to another file of the same size and time since"):
        pickle.loads(pickle.dumps(before))[0]
    assert opened("a.words")[1] == ("12", 8)

    (tmp_path / "b.words").chmod(0o600)  # no other content, though the index would be made again
    (tmp_path / "another name").hardlink_to(tmp_path / "b.words")
    assert pickle.loads(pickle.dumps(going_on))[1] == ("1234", 8)


@pytest.mark.parametrize("content", ["longer than it was", None])
def test_a_file_that_changed_since_its_index_is_named(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.words").write_text("some words")
    (tmp_path / "b.words").write_text("others")
    index_files(tmp_path, Words(), index_dir=tmp_path / "index")
    (tmp_path / "a.words").write_text(content or "some more ")
    os.utime(tmp_path / "a.words", ns=(5, 5))
    worker = FileSet(tmp_path, Words(), index_dir=tmp_path / "index", build=False)
    how = "from 10 to 18 bytes" if content else "in time, with the same size"
    with pytest.raises(ConfigError, match=rf"^\S+/a.words has changed {how} since it was indexed: ."):
        worker[0]
    assert worker[2][0] == "others"


def test_a_file_that_is_cut_off_while_it_is_open_is_named(words: FileSet, tmp_path: Path) -> None:
    words[0]
    size = (tmp_path / "000.words").stat().st_size
    os.truncate(tmp_path / "000.words", size - 1)
    with pytest.raises(ConfigError, match=rf"/000.words ends after {size - 1} bytes, before byte {size}") as failure:
        words[int(words.file_sizes[0]) - 1]
    assert not isinstance(failure.value, UnreadableSample)  # all of its samples are in doubt
    with pytest.raises(ConfigError, match=rf"^\S+/000.words has changed from {size} to {size - 1} bytes since"):
        words[0]


def test_a_file_that_is_written_over_while_it_is_open_is_named(words: FileSet, tmp_path: Path) -> None:
    before, path = words[0], tmp_path / "000.words"
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.swapcase())
    os.utime(path, ns=(5, 5))  # as if clocks were too coarse
    with pytest.raises(ConfigError, match=r"^\S+/000.words has changed in time, with the same size since") as failure:
        words[0]
    assert not isinstance(failure.value, UnreadableSample)
    assert words[len(words) - 1] and before


def test_a_disk_that_fails_makes_one_sample_unreadable(words: FileSet, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, real, (start, _) = words[2], os.pread, words._span(0, 1)

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        if offset == start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    message = rf"^sample 1 of \S+/000.words: \d+ bytes at offset {start} could not be read \(Input/output error\): ."
    with pytest.raises(UnreadableSample, match=message):
        words[1]
    assert words[2] == expected


@pytest.mark.parametrize(
    ("format", "draws_nothing"),
    [
        (JsonLines(text="x"), True),
        (Csv(text="x"), True),
        (TokenFiles(context=1), True),
        (TarSamples(), True),
        (TarSamples(decode=ImageAndClass()), False),
        (Words(), False),
    ],
)
def test_formats_say_if_another_thread_may_read_ahead(format: Format, draws_nothing: bool) -> None:
    assert format.draws_nothing is draws_nothing


def test_a_set_says_if_another_thread_may_read_ahead(words: FileSet, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": ""}\n')
    lines = FileSet(tmp_path, JsonLines(text="x"), index_dir=tmp_path / "index")
    assert (words.may_read_ahead, lines.may_read_ahead) == (False, True)


@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_damaged_index_is_made_again_by_the_parent_alone(kept: int, words: FileSet, tmp_path: Path) -> None:
    path, expected = index_path(tmp_path, Words(), index_dir=tmp_path / "index"), list(words)  # type: ignore[call-overload]
    content = path.read_bytes()[:kept]
    path.unlink()  # the set above has it in a memory map
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"index is missing or damaged.* call index_files in the parent"):
        open_index(tmp_path, Words(), index_dir=tmp_path / "index")
    again = FileSet(tmp_path, Words(), index_dir=tmp_path / "index")
    assert list(again) == expected  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("found", "damaged"),
    [
        (rb'"num_samples": \d+', b'"num_samples": null'),
        (rb'"num_samples": (\d+)', rb'"num_samples": "\1"'),
        (rb'"num_samples": (\d+)', rb'"num_samples": -\1'),
        (rb"(?s).*", b"[" * 100_000),
    ],
)
def test_an_index_of_nonsense_is_none(found: bytes, damaged: bytes, tmp_path: Path) -> None:
    expected = write_words(tmp_path)
    path = index_files(tmp_path, Words(), index_dir=tmp_path / "index").path
    path.write_bytes(re.sub(found, damaged, path.read_bytes(), count=1))
    with pytest.raises(ConfigError, match="index is missing or damaged"):
        open_index(tmp_path, Words(), index_dir=tmp_path / "index")
    assert list(FileSet(tmp_path, Words(), index_dir=tmp_path / "index")) == expected  # type: ignore[call-overload]


def test_formats_have_an_index_each_and_none_takes_anothers(words: FileSet, tmp_path: Path) -> None:
    upper = FileSet(tmp_path, Words(upper=True), index_dir=tmp_path / "index")
    assert [word for word, _ in upper] == [word.upper() for word, _ in words]  # type: ignore[attr-defined]
    mine, other = (index_path(tmp_path, each, index_dir=tmp_path / "index") for each in (Words(), Letters()))
    mine.rename(other)
    for build in (True, False):
        with pytest.raises(ConfigError, match=r"is an index of format .*'words'.*, not of .*'letters'.*delete it"):
            FileSet(tmp_path, Letters(), index_dir=tmp_path / "index", build=build)


def test_an_index_is_json_and_a_table(words: FileSet, tmp_path: Path) -> None:
    content = index_path(tmp_path, Words(), index_dir=tmp_path / "index").read_bytes()
    line, _, table = content.partition(b"\n")
    assert (len(line) + 1) % 64 == 0
    assert [each["num_samples"] for each in json.loads(line)["files"]] == words.file_sizes.tolist()
    spans = np.frombuffer(table, "<i8").reshape(-1, 2)
    assert len(spans) == len(words)
    assert words[0][0].encode() == (tmp_path / "000.words").read_bytes()[slice(*spans[0])]


def index_at_once(folder: Path, barrier: Any, results: Any) -> None:
    barrier.wait(30)
    results.put(list(FileSet(folder, Words(), index_dir=folder / "index")))  # type: ignore[call-overload]


def test_processes_that_index_at_once_do_no_harm(tmp_path: Path) -> None:
    expected = write_words(tmp_path)
    barrier, results = FORK.Barrier(4), FORK.Queue()
    processes = [FORK.Process(target=index_at_once, args=(tmp_path, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=30) == expected for _ in processes)
    for process in processes:
        process.join()
    assert len(list((tmp_path / "index").iterdir())) == 1


STRANGER, GROUP = 4242, 4243
PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda index, mine: None,
    "a link": lambda index, mine: index.symlink_to(mine),
    "a hard link": lambda index, mine: index.hardlink_to(mine),
    "a pipe": lambda index, mine: os.mkfifo(index),
    "another member's": lambda index, mine: (shutil.copy(mine, index), os.chown(index, STRANGER, -1)),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("planted", PLANTED)
def test_each_member_of_a_team_has_an_index_that_no_other_can_forge(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = write_words(tmp_path)
    index_dir = tmp_path / "index"
    mine = index_files(tmp_path, Words(), index_dir=index_dir).path
    forged = mine.rename(tmp_path / "forged")
    forged.write_bytes(forged.read_bytes()[:-16] + bytes(16))
    before = forged.read_bytes()
    os.chown(index_dir, STRANGER if planted == "a pipe" else -1, GROUP)
    index_dir.chmod(0o775)
    PLANTED[planted](mine, forged)
    there = [each.name for each in index_dir.iterdir()]
    for build in (True, False):
        assert list(FileSet(tmp_path, Words(), index_dir=index_dir, build=build)) == expected  # type: ignore[call-overload]
    assert (forged.read_bytes(), [each.name for each in index_dir.iterdir()]) == (before, there)
    (private,) = (tmp_path / "home" / ".cache" / "ddp").iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)
    with pytest.raises(
        ConfigError, match=rf"^others may write {private}, so no index can be there: make it yours alone"
    ):
        index_files(tmp_path, Words(), index_dir=index_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_index_of_whom_a_folder_belongs_to_serves_those_who_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = write_words(tmp_path)
    index = index_files(tmp_path, Words(), index_dir=tmp_path / "index").path
    for path in (index, index.parent):
        os.chown(path, STRANGER, -1)
    for build in (True, False):
        assert list(FileSet(tmp_path, Words(), index_dir=index.parent, build=build)) == expected  # type: ignore[call-overload]
    assert not (tmp_path / "home").exists() or not [*(tmp_path / "home").rglob("*.index")]
    (tmp_path / "000.words").write_text("new")
    changed = FileSet(tmp_path, Words(), index_dir=index.parent)
    assert changed[0] == ("new", 3)
    assert list(FileSet(tmp_path, Words(), index_dir=index.parent, build=False)) == list(changed)  # type: ignore[call-overload]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_words(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^index_dir \S+/file/index cannot be written \(.+\): give"):
        index_files(tmp_path, Words(), index_dir=tmp_path / "file" / "index")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_words(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"^index_dir \S+/index cannot be written \(No space left on device\)"):
        index_files(tmp_path, Words(), index_dir=tmp_path / "index")
    assert not list((tmp_path / "index").iterdir())


# Which files an address means


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s-{08..11}.tar", ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]),
        ("s-{8..9}.tar", ["s-8.tar", "s-9.tar"]),
        ("{b,a}-{0..1}.tar", ["b-0.tar", "b-1.tar", "a-0.tar", "a-1.tar"]),
        ("s-*.tar", ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar", "s-8.tar", "s-9.tar"]),
        ("**/*.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar", "deep/x.tar", "odd[1]{2,3}.tar"]),
        ("@eaDir/*.tar", ["@eaDir/x.tar"]),
        (".new/*", [".new/x.tar"]),
        ("deep", ["deep/x.tar", "deep/y.tar"]),
        ("deep/", ["deep/x.tar", "deep/y.tar"]),
        ("odd[1]{2,3}.tar", ["odd[1]{2,3}.tar"]),
        ("{deep,s-8.tar}", ["deep/x.tar", "deep/y.tar", "s-8.tar"]),
    ],
)
def test_addresses(address: str, expected: list[str], tmp_path: Path) -> None:
    if address.startswith("**"):
        make(tmp_path, "deep/.hidden.tar", "other.txt", *expected)
        make(tmp_path, "deep/@eaDir/x.tar", "__MACOSX/x.tar", "__MACOSX/._x.tar", ".ipynb_checkpoints/x-checkpoint.tar")
    else:
        make(tmp_path, "deep/x.tar", "deep/y.tar", "deep/z.txt", "deep/.hidden.tar", "odd[1]{2,3}.tar")
        make(tmp_path, *(f"s-{i}.tar" for i in ("08", "09", "10", "11", "8", "9")))
        make(tmp_path, "a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar", "@eaDir/x.tar", ".new/x.tar")
    found = listed(f"{tmp_path}/{address}", suffixes=[".tar"], storage=DIRECT)
    assert found == [f"{tmp_path}/{name}" for name in expected]
    assert listed(f"file://{tmp_path}/{address}", suffixes=[".tar"], storage=DIRECT) == found


def test_lists_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "b.tar", "a.tar", "sub/c.tar")
    monkeypatch.chdir(tmp_path)
    found = listed(["b.tar", Path("sub"), "a.tar"], suffixes=[".tar"], storage=DIRECT)
    assert found == [str(tmp_path / name) for name in ("b.tar", "sub/c.tar", "a.tar")]


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["*.zip"], r"\*.zip matches no file: ."),
        (["none.words"], r"none.words does not exist: ."),
        (["{a,none}.words"], r"none.words does not exist: ."),
        (["sub"], r"sub has no file that ends with .words: ."),
        (["a.words", "*.words"], r"a.words is listed twice, .*: list it once"),
        ([], r"the list of addresses is empty: ."),
        (["empty.words"], r"empty.words is empty: ."),
        (["a.words", "sub/../a.words"], r"a.words and \S+/sub/../a.words are the same file, .*: list it once"),
        (["links"], r"x.words and \S+/links/y.words are the same file"),
        (["links/[xy].*"], r"x.words and \S+/links/y.words are the same file"),
        (["sub/**/*.tar"], r"sub/b.tar and \S+/sub/again/b.tar are the same file"),
        (["again/b.tar", "sub/b.tar"], r"sub/b.tar and \S+/again/b.tar are the same file"),
        (["a.words", "hard.words"], r"a.words and \S+/hard.words are the same file"),
        (["gone"], "gone/z.words is a link to a file that does not exist: restore the file"),
        (["gone/*"], "gone/z.words is a link to a file that does not exist"),
        (["loop"], r"loop/self.words cannot be looked up \(Too many levels of symbolic links\): ."),
        (["a" * 5000], r"a+ cannot be looked up \(File name too long\): ."),
        (["a\0b"], r"a.x00b' is no address: ."),
        (["[1]/*.words"], r"\[1\]/\*.words matches no file: .*for a name with \[, write \[\[\]\), and"),
    ],
)
def test_addresses_that_mean_nothing_are_named(addresses: list[str], message: str, tmp_path: Path) -> None:
    make(tmp_path, "a.words", "sub/b.tar")
    (tmp_path / "empty.words").write_text("")
    make(tmp_path, "links/x.words", "loop/x.words", "gone/x.words", "[1]/x.words")
    for link, target in (("links/y.words", "x.words"), ("loop/self.words", "self.words"), ("gone/z.words", "nowhere")):
        (tmp_path / link).symlink_to(target)
    (tmp_path / "hard.words").hardlink_to(tmp_path / "a.words")
    for link in ("again", "sub/again"):
        (tmp_path / link).symlink_to(tmp_path / "sub")
    with pytest.raises(ConfigError, match=rf"^(\S+/)?{message}") as failure:
        FileSet([f"{tmp_path}/{each}" for each in addresses], Words(), index_dir=tmp_path / "index")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("addresses", [None, 5, ["a", None], b"a"])
def test_what_is_no_address_is_named(addresses: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no address: give a file"):
        FileSet(addresses, Words(), index_dir=tmp_path)


# Remote files


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("protocol", ["memory", "fifth"])
def test_remote_files_are_the_same_set(protocol: str, is_cached: bool, memory: Any, tmp_path: Path) -> None:
    expected = write_words(tmp_path)
    for path in tmp_path.glob("*.words"):
        memory.pipe_file(f"/set/{path.name}", path.read_bytes())
    storage = Storage(Retries(first_pause_s=0.0), cache_dir=tmp_path / "cache" if is_cached else None)
    ask: Any = {"index_dir": tmp_path / "index", "storage": storage}
    words = FileSet(f"{protocol}://set/*.words", Words(), **ask)
    assert list(words) == expected  # type: ignore[call-overload]
    before = EveryFifthFails.num_reads
    worker = pickle.loads(pickle.dumps(FileSet(f"{protocol}://set/*.words", Words(), build=False, **ask)))
    assert list(worker) == expected
    assert is_cached == (not EveryFifthFails.num_reads > before) or protocol == "memory"
    unread = FileSet(f"{protocol}://set/*.words", Words(), build=False, **ask)
    memory.pipe_file("/set/000.words", b"changed")
    again = FileSet(f"{protocol}://set/*.words", Words(), **ask)
    assert again[0] == ("changed", 7)
    if not is_cached:
        with pytest.raises(ConfigError, match=r"set/000.words has changed from \d+ to 7 bytes since"):
            unread[0]


def test_a_network_that_fails_makes_one_sample_unreadable(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/set/a.words", b"one two")
    storage = Storage(Retries(num_retries=0))
    words = FileSet("odd://set/a.words", Words(), index_dir=tmp_path, storage=storage)
    monkeypatch.setattr(Odd, "answer", staticmethod(lambda data: data[1:]))
    with pytest.raises(UnreadableSample, match=r"^sample 1 of odd://set/a.words: .* could not be read in 1 tries"):
        words[1]
    monkeypatch.undo()
    assert words[1] == ("two", 7)
