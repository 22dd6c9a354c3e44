"""Lines of several processes: each is whole and has its label, however its bytes arrive."""

import asyncio
import io
import subprocess
import sys

import pytest

from hfax.launch.labels import copy_labelled


def labelled(*chunks: bytes) -> bytes:
    async def copy() -> bytes:
        reader, out = asyncio.StreamReader(), io.BytesIO()
        copying = asyncio.create_task(copy_labelled(reader, out, "[1] "))
        for chunk in chunks:
            reader.feed_data(chunk)
            await asyncio.sleep(0.001)
        reader.feed_eof()
        await copying
        return out.getvalue()

    return asyncio.run(copy())


@pytest.mark.parametrize(
    ("chunks", "written"),
    [
        ((), b""),
        ((b"one\ntwo\n",), b"[1] one\n[1] two\n"),
        ((b"on", b"e\nt", b"wo\n"), b"[1] one\n[1] two\n"),
        ((b"no end",), b"[1] no end\n"),
        ((b"\n\n",), b"[1] \n[1] \n"),
        ((b"10%\r20%", b"\r30%\n"), b"[1] 10%\r[1] 20%\r[1] 30%\n"),
        ((b"windows\r", b"\nnext\n"), b"[1] windows\r\n[1] next\n"),
        ((b"50%\r",), b"[1] 50%\n"),
        ((b"\xff\xfe\n",), b"[1] \xff\xfe\n"),
        ((b"x" * 200_000 + b"\n",), b"[1] " + b"x" * 200_000 + b"\n"),
    ],
)
def test_lines_are_whole_and_have_a_label(chunks: tuple[bytes, ...], written: bytes) -> None:
    assert labelled(*chunks) == written


@pytest.mark.multiprocess
def test_two_processes_say_who_writes(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, jax\n"
        "for i in range(200):\n"
        "    print('out', jax.process_index(), i)\n"
        "    print('err', jax.process_index(), i, file=sys.stderr)\n"
    )
    command = [sys.executable, "-m", "hfax", "launch", "--local", "2", "--cpu-devices", "1", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    for text, name in ((run.stdout, "out"), (run.stderr, "err")):
        for index in range(2):
            mine = [line for line in text.splitlines() if line.startswith(f"[{index}] {name} ")]
            assert mine == [f"[{index}] {name} {index} {i}" for i in range(200)]


@pytest.mark.multiprocess
def test_a_reader_that_leaves_ends_the_run(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import itertools\nfor i in itertools.count():\n    print(i)\n")
    command = [sys.executable, "-m", "hfax", "launch", "--local", "2", "--cpu-devices", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(60) == 141
