from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import tiny
from opd.config.schema import ModelConfig
from opd.errors import OpdError
from opd.models import describe, load, load_adapter, load_tokenizer, pick_device, same_vocabulary
from opd.models.facts import find_stop_ids, num_real_tokens
from opd.models.reference import FolderReference, GgufReference, HubReference, PackageReference, parse

IDS = torch.tensor([[5, 70, 80, 90, 100, 2]])


def fp32(model):
    return ModelConfig(model=str(model), dtype="float32")


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


# ---- references ------------------------------------------------------------------------------------------------------


def test_references_are_told_apart(tiny_model_folder, tmp_path):
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    assert parse(str(tiny_model_folder)) == FolderReference(tiny_model_folder)
    assert parse("Qwen/Qwen3-1.7B") == HubReference("Qwen/Qwen3-1.7B")
    assert parse("gpt2") == HubReference("gpt2")
    assert parse(f"gguf:{gguf}") == GgufReference(gguf)
    assert parse("package:smollm2-135m-instruct") == PackageReference("smollm2-135m-instruct")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("./nowhere/model", "no such folder"),
        ("a/b/c", "no such folder"),
        ("gguf:nowhere.gguf", "no file nowhere.gguf"),
        ("packge:smollm2-135m-instruct", "did you mean package:smollm2-135m-instruct?"),
    ],
)
def test_a_wrong_reference_says_what_is_wrong(text, says):
    with pytest.raises(OpdError, match=says.replace("?", r"\?")):
        parse(text)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(OpdError, match=r"no config\.json"):
        parse(str(tmp_path))


def test_revision_of_a_folder_is_refused_not_ignored(tiny_model_folder):
    with pytest.raises(OpdError, match="revision"):
        load_tokenizer(ModelConfig(model=str(tiny_model_folder), revision="main"))


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_load_returns_the_saved_model_and_its_facts(tiny_model_folder, tiny_model, tiny_tokenizer):
    loaded = load(fp32(tiny_model_folder), device="cpu")
    assert torch.equal(logits(loaded.model), logits(tiny_model))
    assert not loaded.model.training
    assert loaded.vocab_size == len(tiny_tokenizer) == 320
    assert loaded.model.get_output_embeddings().weight.shape[0] == 384
    assert loaded.stop_ids == {2}
    assert loaded.pad_id == 2
    assert loaded.device == torch.device("cpu")
    assert loaded.tokenizer.get_vocab() == tiny_tokenizer.get_vocab()


def test_load_honours_dtype_and_attention(tiny_model_folder):
    loaded = load(ModelConfig(model=str(tiny_model_folder), dtype="bfloat16", attention="eager"), device="cpu")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.config._attn_implementation == "eager"


def test_fingerprint_follows_the_weights(folder, tiny_model_folder):
    first = load(fp32(tiny_model_folder), device="cpu").fingerprint
    assert load(fp32(folder), device="cpu").fingerprint == first
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(fp32(folder), device="cpu").fingerprint != first


def test_missing_weights_are_an_error_not_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OpdError, match=r"1 missing .*up_proj"):
        load(fp32(folder), device="cpu")


def test_weights_of_another_shape_are_an_error(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(33)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OpdError, match=r"model\.norm\.weight"):
        load(fp32(folder), device="cpu")


def test_broken_weights_are_an_error(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OpdError, match="cannot load the model"):
        load(fp32(folder), device="cpu")


def test_weights_without_use_are_named(folder, capsys):
    weights = load_file(folder / "model.safetensors")
    weights["model.extra.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(fp32(folder), device="cpu")
    assert "model.extra.weight: not loaded" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_an_error():
    with pytest.raises(OpdError, match="check the id, the network"):
        load(fp32("no-such-owner/no-such-model"), device="cpu")


def test_a_folder_without_tokenizer_is_an_error(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(OpdError, match="cannot load the tokenizer"):
        load(fp32(folder), device="cpu")


def test_attention_that_is_not_there_is_an_error(tiny_model_folder, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    with pytest.raises(OpdError, match="set attention: sdpa"):
        load(ModelConfig(model=str(tiny_model_folder), attention="flash_attention_2"), device="cpu")


def test_a_model_without_sdpa_says_to_use_eager(tmp_path, tiny_tokenizer):
    tiny.build_gemma2(384).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(OpdError, match="set attention: eager"):
        load(fp32(tmp_path), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_an_error(tiny_model_folder):
    with pytest.raises(OpdError, match="on cuda"):
        load(fp32(tiny_model_folder), device="cuda")


def test_only_a_cpu_is_said_aloud(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert pick_device() == torch.device("cpu")
    assert "NO GPU FOUND" in capsys.readouterr().err


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, opd.models, opd.models.convert; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- stop ids and vocabulary -----------------------------------------------------------------------------------------


def test_stop_ids_join_tokenizer_generation_config_and_template(folder):
    # The tokenizer says <|endoftext|> (0), the generation config adds 7, the template ends turns with <|im_end|> (2).
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [7]}))
    assert load(fp32(folder), device="cpu").stop_ids == {0, 2, 7}
    assert describe(fp32(folder)).stop_ids == {0, 2, 7}


def test_a_template_that_refuses_the_probe_leaves_the_listed_stop_ids(tiny_model):
    tokenizer = tiny.build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ raise_exception('only tools') }}"
    assert find_stop_ids(tokenizer, tiny_model.generation_config) == {0, 2}


def test_a_model_that_can_never_stop_is_refused(folder):
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None, "pad_token": None}))
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(OpdError, match="no token that ends a completion"):
        load(fp32(folder), device="cpu")


def test_tokens_without_a_row_are_not_counted(tiny_tokenizer):
    assert num_real_tokens(tiny_tokenizer, 384) == 320
    assert num_real_tokens(tiny_tokenizer, 300) == 300


def test_describe_reads_no_weights(folder):
    (folder / "model.safetensors").unlink()
    facts = describe(fp32(folder))
    assert (facts.model_type, facts.num_rows, facts.vocab_size) == ("llama", 384, 320)
    assert facts.has_chat_template
    assert facts.max_positions == 1024


def test_vocabularies_are_compared_by_token_not_by_size(folder, tiny_model_folder):
    ours = describe(fp32(tiny_model_folder))
    assert same_vocabulary(ours, describe(fp32(tiny_model_folder))) is None
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    theirs = describe(fp32(folder))
    assert theirs.vocab_size == ours.vocab_size
    reason = same_vocabulary(ours, theirs)
    assert reason is not None
    assert "2 of the first" in reason
    assert "'!' has id 3 and 4" in reason


def test_padded_rows_do_not_make_another_vocabulary(folder, tiny_model_folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 448}))
    assert same_vocabulary(describe(fp32(tiny_model_folder)), describe(fp32(folder))) is None


def test_a_smaller_vocabulary_is_another_one(tmp_path, tiny_model, tiny_model_folder):
    tiny_model.save_pretrained(tmp_path)
    tiny.build_tokenizer(300).save_pretrained(tmp_path)
    small, large = describe(fp32(tmp_path)), describe(fp32(tiny_model_folder))
    assert "0 of the first are missing" in str(same_vocabulary(small, large))
    assert "20 of the first are missing" in str(same_vocabulary(large, small))


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tiny_model_folder, tmp_path):
    """The folder of a LoRA adapter that changes the model, and the logits with it."""
    model = get_peft_model(
        load(fp32(tiny_model_folder), device="cpu").model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits(model.eval())


def test_an_adapter_comes_back_whole(adapter, tiny_model_folder, tiny_model):
    path, expected = adapter
    base = load(fp32(tiny_model_folder), device="cpu")
    adapted = load_adapter(base, path)
    assert torch.equal(logits(adapted.model), expected)
    assert not torch.equal(expected, logits(tiny_model))
    assert not adapted.model.training
    assert adapted.fingerprint != base.fingerprint


def test_an_adapter_that_names_another_base_or_changes_nothing_is_said_aloud(adapter, tiny_model_folder, capsys):
    path, _ = adapter
    load_adapter(load(fp32(tiny_model_folder), device="cpu"), path)
    assert "adapter" not in capsys.readouterr().err
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "another/model"}))
    weights = load_file(path / "adapter_model.safetensors")
    save_file({name: value * ("lora_A" in name) for name, value in weights.items()}, path / "adapter_model.safetensors")
    load_adapter(load(fp32(tiny_model_folder), device="cpu"), path)
    said = capsys.readouterr().err
    assert "was trained on another/model" in said
    assert "changes nothing" in said


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_adapter_is_an_error(adapter, tiny_model_folder, file):
    path, _ = adapter
    (path / file).unlink()
    with pytest.raises(OpdError, match=f"there is no {file}"):
        load_adapter(load(fp32(tiny_model_folder), device="cpu"), path)


@pytest.mark.parametrize("weights", [{}, {"base_model.model.x.lora_A.weight": torch.zeros(0)}])
def test_an_empty_adapter_is_an_error(adapter, tiny_model_folder, weights):
    path, _ = adapter
    save_file(weights, path / "adapter_model.safetensors")
    with pytest.raises(OpdError, match="holds no weights"):
        load_adapter(load(fp32(tiny_model_folder), device="cpu"), path)


def test_an_adapter_with_a_tensor_missing_is_an_error(adapter, tiny_model_folder):
    path, _ = adapter
    weights = load_file(path / "adapter_model.safetensors")
    gone = next(name for name in weights if "lora_B" in name)
    del weights[gone]
    save_file(weights, path / "adapter_model.safetensors")
    with pytest.raises(OpdError, match="1 of its tensors do not fit"):
        load_adapter(load(fp32(tiny_model_folder), device="cpu"), path)


def test_an_adapter_of_another_architecture_is_an_error(adapter, tmp_path, tiny_tokenizer):
    path, _ = adapter
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["c_attn"]}))
    tiny.build_llama(384).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(OpdError, match="load it onto the model that it was trained on"):
        load_adapter(load(fp32(tmp_path / "base"), device="cpu"), path)


def test_an_adapter_of_another_shape_is_an_error(adapter, tiny_model_folder):
    path, _ = adapter
    weights = load_file(path / "adapter_model.safetensors")
    save_file(
        {k: torch.ones(v.shape[0], v.shape[1] + 1) for k, v in weights.items()}, path / "adapter_model.safetensors"
    )
    with pytest.raises(OpdError, match="does not fit"):
        load_adapter(load(fp32(tiny_model_folder), device="cpu"), path)


# ---- the tiny models themselves, and a real one ----------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_tiny_models_run_and_have_padded_rows(name, tiny_tokenizer):
    rows = tiny.padded_rows(tiny_tokenizer)
    out = logits(tiny.ARCHITECTURES[name](rows))
    assert out.shape == (*IDS.shape, rows)
    assert rows > len(tiny_tokenizer)
    assert out.std() > 0.1


def test_tiny_text_survives_the_tokenizer(tiny_tokenizer):
    text = "What is 8 times 3? \\boxed{24} — naïve"
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


def test_tiny_sums_adds_numbers_it_has_not_seen(tiny_sums):
    heldout = tiny.sum_pairs("heldout")
    assert not set(heldout) & set(tiny.sum_pairs("train"))
    assert len(heldout) + len(tiny.sum_pairs("train")) == 10_000
    correct = 0
    for a, b in heldout[:50]:
        messages = [{"role": "user", "content": tiny.question(a, b)}]
        ids = tiny_sums.tokenizer.apply_chat_template(messages, return_dict=False)
        start = len(ids)
        while ids[-1] not in tiny_sums.stop_ids and len(ids) < start + 5:
            ids.append(int(logits(tiny_sums.model, torch.tensor([ids]))[0, -1].argmax()))
        correct += tiny_sums.tokenizer.decode(ids[start:]) == tiny.answer(a, b) + "<eos>"
    assert correct >= 49
    assert (tiny_sums.vocab_size, tiny_sums.stop_ids) == (257, {256})


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_answers(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smollm2.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    out = smollm2.model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    assert "Paris" in smollm2.tokenizer.decode(out[0, ids.shape[1] :])
    assert smollm2.stop_ids == {2}
    # Trained with digits split off: the two spaces before a digit are one token.
    assert smollm2.tokenizer.tokenize("a  8") == ["a", "ĠĠ", "8"]


@pytest.mark.parametrize("name", ["nonsense", "cuda:99"])
def test_a_device_that_does_not_exist_is_named(name: str) -> None:
    from opd.models import known_device

    assert known_device("cpu").type == "cpu"
    with pytest.raises(OpdError, match=f"no device '{name}'"):
        known_device(name)
