import random
import struct

import gguf
import numpy as np
import pytest
from tests.artifacts.gguf_writing import write_gguf

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.resolve import find_wheel_model
from octavo.errors import ModelFileError

METADATA = {
    "a.string": "héllo 🙂",
    "a.flag": True,
    "a.number": 7,
    "a.float": 0.5,
    "a.words": ["one", "", "drei 三"],
    "a.ids": [3, 1, 2],
}


@pytest.fixture
def path(tmp_path):
    tensors = {
        "small": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.arange(64, dtype=np.float16).reshape(4, 16),
    }
    return write_gguf(tmp_path / "m.gguf", METADATA, tensors)


def patched(path, old, new, count=1):
    data = path.read_bytes()
    assert old in data
    bad = path.with_name("bad.gguf")
    bad.write_bytes(data.replace(old, new, count))
    return bad


def refuse(path, *words, tensor=None):
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.tensor == tensor


def test_values_and_tensors_come_back(path):
    file = GGUFFile.open(path)
    for key, value in METADATA.items():
        found = file.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
    small = file.tensors["small"]
    assert (small.shape, small.type.name, small.nbytes) == ((2, 3), "F32", 24)
    assert file.raw("small").view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert file.raw("half").view(np.float16).tolist() == list(range(64))
    assert not file.raw("small").flags.writeable


def test_quantised_sizes_and_torch_order(tmp_path):
    data = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "q.gguf")
    assert (file.tensors["w"].shape, file.tensors["w"].nbytes) == ((4, 64), 4 * 2 * 34)
    assert file.raw("w").tobytes() == data.tobytes()


def test_a_missing_tensor_is_named(path):
    with pytest.raises(ModelFileError, match=r"m\.gguf: tensor 'lost': is missing"):
        GGUFFile.open(path).raw("lost")


def test_every_truncation_is_refused(path):
    data = path.read_bytes()
    end = max(t.offset + t.nbytes for t in GGUFFile.open(path).tensors.values())  # beyond is only padding
    bad = path.with_name("cut.gguf")
    for length in range(end):
        bad.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            GGUFFile.open(bad)


def test_mutated_files_open_or_are_refused(path):
    data = path.read_bytes()
    bad = path.with_name("mutated.gguf")
    rng = random.Random(0)
    refused = 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        bad.write_bytes(changed)
        try:
            file = GGUFFile.open(bad)
        except ModelFileError:
            refused += 1
        else:
            assert all(file.raw(name).nbytes == tensor.nbytes for name, tensor in file.tensors.items())
    assert refused > 300


def test_wrong_magic_version_and_byte_order(path):
    refuse(patched(path, b"GGUF", b"GGML"), "not a GGUF file")
    refuse(patched(path, struct.pack("<I", 3), struct.pack("<I", 1)), "version 1")
    refuse(patched(path, struct.pack("<I", 3), struct.pack(">I", 3)), "big-endian")


def test_unknown_types(path):
    entry = b"small" + struct.pack("<IQQ", 2, 3, 2)
    refuse(patched(path, entry + struct.pack("<I", 0), entry + struct.pack("<I", 999)), "type 999", tensor="small")
    key = b"a.number"
    refuse(patched(path, key + struct.pack("<I", 4), key + struct.pack("<I", 77)), "a.number", "type 77")


def test_tensors_out_of_range_misaligned_overlapping_and_twice(path):
    entry = b"half" + struct.pack("<IQQI", 2, 16, 4, 1)
    for offset, word in ((1 << 40, "truncated"), (7, "multiple of 32"), (0, "overlaps")):
        bad = patched(path, entry + struct.pack("<Q", 32), entry + struct.pack("<Q", offset))
        with pytest.raises(ModelFileError, match=word):
            GGUFFile.open(bad)
    huge = b"small" + struct.pack("<IQQ", 2, 1 << 62, 1 << 62)
    refuse(patched(path, b"small" + struct.pack("<IQQ", 2, 3, 2), huge), "truncated", tensor="small")
    longer = b"\x05\0\0\0\0\0\0\0small", b"\x04\0\0\0\0\0\0\0half"
    data = path.read_bytes().replace(*longer)  # one byte fewer: everything after shifts, but the table is read first
    bad = path.with_name("twice.gguf")
    bad.write_bytes(data)
    refuse(bad, "twice", tensor="half")


def test_claims_beyond_the_file_are_refused_before_memory_is_taken(path):
    words = b"a.words" + struct.pack("<II", 9, 8)
    refuse(patched(path, words + struct.pack("<Q", 3), words + struct.pack("<Q", 1 << 60)), "a.words")
    counts = struct.pack("<IQ", 3, 2)
    refuse(patched(path, counts, struct.pack("<IQ", 3, 1 << 50)), "claims")


def test_a_folder_or_nothing_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        refuse(path, "cannot be read")
    (tmp_path / "empty.gguf").write_bytes(b"")
    refuse(tmp_path / "empty.gguf", "0 bytes")


@pytest.mark.skipif(find_wheel_model() is None, reason="needs the default model")
class TestDefaultModel:
    def test_header_equals_the_gguf_packages(self):
        path = find_wheel_model().weights[0]
        file, reader = GGUFFile.open(path), gguf.GGUFReader(path)
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            mine = file.tensors[tensor.name]
            assert (mine.shape, mine.type, mine.offset) == (
                tuple(tensor.shape.tolist()[::-1]),
                tensor.tensor_type,
                tensor.data_offset,
            )
            assert mine.nbytes == tensor.n_bytes
        for key in ("tokenizer.ggml.pre", "llama.rope.freq_base", "tokenizer.chat_template", "llama.block_count"):
            assert file.metadata[key] == reader.fields[key].contents()

    def test_a_truncated_download_is_refused(self, tmp_path):
        path = find_wheel_model().weights[0]
        for length in (1 << 20, 3 << 20):  # inside the vocabulary, and inside the weights
            with path.open("rb") as whole:
                (tmp_path / "cut.gguf").write_bytes(whole.read(length))
            with pytest.raises(ModelFileError, match="truncated"):
                GGUFFile.open(tmp_path / "cut.gguf")
