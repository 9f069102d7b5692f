"""Whatever is given as a model ends in an architecture or in a clear error, soon."""

import json
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.models import ModelArchitecture, ModelNotUnderstood, catalogue, read_model

LLAMA = dict(catalogue.find("llama-3.1-8b").architecture.facts)
NAMES = sorted({name for entry in catalogue.entries() for name in entry.architecture.facts})
NONSENSE = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.just(10**18), st.just(-(10**18)),
    st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)  # fmt: skip


@given(
    st.sampled_from([entry.name for entry in catalogue.entries()]),
    st.dictionaries(st.sampled_from(NAMES), NONSENSE, max_size=4),
)
def test_any_field_may_be_nonsense(name, changes):
    config = dict(catalogue.find(name).architecture.facts) | changes
    try:
        model = ModelArchitecture.from_config(config)
    except ModelNotUnderstood as error:
        assert len(str(error)) < 4000
    else:
        assert model.parameters > 0
        assert model.kv_bytes_per_token("bf16") >= 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -4096}, "hidden_size is -4096"),
        ({"hidden_size": float("nan")}, "hidden_size is nan"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers is 10{18}, larger"),
        ({"vocab_size": "128256"}, "vocab_size is '128256'"),
        ({"head_dim": [128]}, "head_dim is a list"),
        ({"torch_dtype": "int3"}, "'int3' is not known"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"quantization_config": ["awq"]}, "quantization_config is a list"),
        ({"vision_config": 7}, "vision_config is a int"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor is inf"),
    ],
)
def test_wrong_values_are_named(change, words):
    with pytest.raises(ModelNotUnderstood, match=words):
        ModelArchitecture.from_config(LLAMA | change)


@pytest.mark.parametrize("value", [0, -1, float("nan"), 10**18, -(10**18), "8", "", [], {}, True])
def test_any_family_answers_a_hostile_value_or_a_missing_key_within_a_second(value):
    start = time.process_time()
    for entry in catalogue.entries():
        facts = dict(entry.architecture.facts)
        for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"):
            with pytest.raises(ModelNotUnderstood, match=name):
                ModelArchitecture.from_config(facts | {name: value})
    with pytest.raises(ModelNotUnderstood, match="hidden_size is missing"):
        ModelArchitecture.from_config({"model_type": "llama"})
    assert time.process_time() - start < 1


@pytest.mark.parametrize("config", [[], "llama", 7, None])
def test_what_is_no_object_is_refused(config):
    with pytest.raises(ModelNotUnderstood, match="a configuration is a JSON object"):
        ModelArchitecture.from_config(config)


def test_wrappers_that_go_round_in_a_circle_are_refused():
    circle: dict[str, object] = {"model_type": "llama"}
    circle["text_config"] = circle
    with pytest.raises(ModelNotUnderstood, match="goes round in a circle"):
        ModelArchitecture.from_config(circle)


def test_a_config_of_200_mb_is_refused_at_once(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.seek(200 << 20)
        stream.write(b"}")
    start = time.process_time()
    with pytest.raises(ModelNotUnderstood, match="has 209,715,201 bytes"):
        read_model(file)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "nul", "[" * 100_000])
def test_broken_files_name_themselves(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotUnderstood, match=r"config\.json"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"GGML", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77),
    ],
)  # fmt: skip
def test_hostile_gguf_headers_end_in_an_error(tmp_path, data):
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelNotUnderstood, match=r"model\.gguf"):
        read_model(file)


@pytest.mark.parametrize("data", [b"", b"\xff" * 16, struct.pack("<Q", 4) + b"[1,2"])
def test_hostile_safetensors_headers_end_in_an_error(tmp_path, data):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelNotUnderstood, match="safetensors"):
        read_model(tmp_path)
