"""Folders whose config, tensors and files disagree: decided as transformers decides them, or refused with a sentence."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_support import PagedRun, random_weights
from safetensors.torch import load_file, save_file

from kvlab.model import LlamaConfig, hf, load_model
from kvlab.model.checkpoint import save_folder
from kvlab.types import UserError

CONFIG = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                     bos_token_id=1, eos_token_ids=(2,), stored_dtype="float32", max_position_embeddings=128)  # fmt: skip
NUM_TOKENS = 80
IDS = [int(i) for i in torch.randint(0, 61, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write(folder: Path, **changes: Any) -> Path:
    """A folder with an embedding and another lm_head; `changes` go into its config.json (a value of `...` takes the key away)."""
    weights = {name: tensor.float() for name, tensor in random_weights(CONFIG, seed=0).items()}
    save_folder(folder, CONFIG, weights)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}), encoding="utf-8")
    return folder


def ours(folder: Path) -> torch.Tensor:
    run = PagedRun(load_model(hf(path=str(folder)), "float32", "cpu").model)
    run.tables = {0: list(range(8))}
    return run.step({0: IDS})[0]


def theirs(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0]


def assert_same(folder: Path) -> None:
    torch.testing.assert_close(ours(folder), theirs(folder), rtol=0, atol=2e-5)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(hf(path=str(folder)), "float32", "cpu")
    return str(caught.value)


def store(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)


# ------------------------------------------------------ embeddings and lm_head


def test_a_head_of_its_own_counts_although_the_config_ties_it(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    assert_same(folder)
    untied = write(tmp_path / "untied", tie_word_embeddings=False)
    assert torch.equal(ours(folder), ours(untied))
    assert not load_model(hf(path=str(folder)), "float32", "cpu").config.tie_word_embeddings


def test_an_equal_head_is_tied(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    store(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    assert_same(folder)
    assert load_model(hf(path=str(folder)), "float32", "cpu").config.tie_word_embeddings


def test_a_head_alone_is_the_embedding_too(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    store(folder, lambda weights: weights.__delitem__(EMBEDDING))
    assert_same(folder)


def test_an_embedding_alone_is_the_head_too(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    store(folder, lambda weights: weights.__delitem__(HEAD))
    assert_same(folder)


@pytest.mark.parametrize(("tied", "absent"), [(False, [HEAD]), (False, [EMBEDDING]), (True, [EMBEDDING, HEAD])])
def test_a_missing_embedding_is_named(tmp_path: Path, tied: bool, absent: list[str]) -> None:
    """transformers would draw random numbers in its place."""
    folder = write(tmp_path, tie_word_embeddings=tied)
    store(folder, lambda weights: [weights.pop(name) for name in absent] and None)
    assert f"tensor {absent[0]!r} is missing" in refusal(folder)


def test_a_head_of_another_shape_or_kind_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    store(folder, lambda weights: weights.update({HEAD: torch.ones(60, 32)}))
    assert "tensor 'lm_head.weight' has shape [60, 32], but config.json asks for [61, 32]" in refusal(folder)
    store(folder, lambda weights: weights.update({HEAD: torch.ones(61, 32, dtype=torch.int8)}))
    assert "tensor 'lm_head.weight' is stored as I8" in refusal(folder)


def test_two_ranks_untie_as_one_does(tmp_path: Path) -> None:
    from kvlab.model.parallel import Shard

    class Alone:
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return x

    spec = hf(path=str(write(tmp_path, tie_word_embeddings=True)))
    whole = load_file(tmp_path / SINGLE)[HEAD]
    parts = [spec.load(torch.float32, torch.device("cpu"), Shard(rank, 2, Alone())).model.lm_head.weight for rank in (0, 1)]
    assert torch.equal(torch.cat(parts)[:61], whole)


# ------------------------------------------------------ files


def shards(folder: Path) -> dict[str, str]:
    """The weights in two files with an index beside them; the single file stays."""
    weights = load_file(folder / SINGLE)
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return weight_map


def test_the_single_file_counts_beside_stale_shards(tmp_path: Path) -> None:
    folder = write(tmp_path)
    shards(folder)
    store(folder, lambda weights: weights[EMBEDDING].mul_(1.5))
    assert_same(folder)


def test_untied_shards(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    shards(folder)
    (folder / SINGLE).unlink()
    assert_same(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    shards(folder)
    (folder / SINGLE).unlink()
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {HEAD: torch.ones(61, 32)}, second)
    assert "both hold tensor 'lm_head.weight'" in refusal(folder)


def test_an_index_of_other_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    weight_map = shards(folder)
    (folder / SINGLE).unlink()
    wrong = weight_map | {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": wrong}), encoding="utf-8")
    assert "says that model-00001-of-00002.safetensors holds tensor 'model.norm.weight', but it does not" in refusal(folder)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_not_dropped_in_silence(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path)
    (folder / file).write_bytes(b"{}")
    assert f"holds an adapter beside the model ({file})" in refusal(folder)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 12345\n"


@pytest.mark.parametrize("file", [SINGLE, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX])
def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path)
    if file == INDEX:
        (folder / SINGLE).unlink()
    if file == "tokenizer_config.json":
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / file).write_text(POINTER, encoding="utf-8")
    assert f"{folder / file} is a Git LFS pointer" in refusal(folder)


# ------------------------------------------------------ rotary embeddings

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default parameters and llama3 scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": LLAMA3},
    "default parameters and linear scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                                              "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 parameters and default scaling": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_scaling": {"rope_type": "default"}},
    "llama3 parameters and empty scaling": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_scaling": {}},
    "an inner and an outer original length": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_scaling": None,
                                              "original_max_position_embeddings": 64},
    "an outer original length alone": {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
                                       "rope_scaling": ..., "original_max_position_embeddings": 64},
    "no original length": {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
                           "rope_scaling": ...},
    "an outer base beside an inner one": {"rope_theta": 90.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                                          "rope_scaling": None},
    "an outer base alone": {"rope_theta": 90.0, "rope_parameters": None, "rope_scaling": None},
    "scaling without a base beside parameters with one": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                                                          "rope_theta": ..., "rope_scaling": {"type": "linear", "factor": 4.0}},
    "scaling with a base of its own": {"rope_theta": 90.0, "rope_parameters": None,
                                       "rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "rope_type beside another type": {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 4.0}},
    "no rope at all": {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_rope_settings_in_two_places_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    assert_same(write(tmp_path, **ROPES[kind]))


def test_random_rope_settings(tmp_path: Path) -> None:
    """Every field absent, or one of two values, in every place: 40 of the combinations."""
    rng = random.Random(5)
    objects = [..., None, {}]
    for kind, theta in itertools.product(("default", "linear", "llama3"), (None, 90.0, 700.0)):
        base = {"rope_theta": theta} if theta else {}
        objects.append(base | ({"default": {"rope_type": "default"}, "linear": {"type": "linear", "factor": 3.0}, "llama3": LLAMA3}[kind]))
    for number in range(40):
        changes = {"rope_parameters": rng.choice(objects), "rope_scaling": rng.choice(objects), "rope_theta": rng.choice([..., 50.0, 3e4]),
                   "original_max_position_embeddings": rng.choice([..., ..., 40])}  # fmt: skip
        assert_same(write(tmp_path / str(number), **changes))


BAD_ROPES = {
    "factor = 0 is not allowed": {"type": "linear", "factor": 0},
    "factor = -2.0 is not allowed": {"type": "linear", "factor": -2.0},
    "factor = nan is not allowed": {"type": "linear", "factor": float("nan")},
    "factor = '2' is not allowed": {"type": "linear", "factor": "2"},
    "factor = True is not allowed": {"type": "linear", "factor": True},
    "'factor' is missing": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "'rope_theta' is missing": {"rope_type": "default", "rope_theta": None},
    "rope_theta = 0 is not allowed": {"rope_type": "default", "rope_theta": 0},
    "low_freq_factor = 4 must be below high_freq_factor = 4": LLAMA3 | {"low_freq_factor": 4.0},
    "rope scaling 'yarn' is not supported": {"rope_type": "yarn", "factor": 2.0},
    "rope scaling None is not supported": {"rope_type": None, "type": "linear", "factor": 2.0},
    "rope_scaling = 'linear' is not allowed": "linear",
    "holds settings for 'full_attention' layers": {"full_attention": {"rope_type": "default"}},
    "partial_rotary_factor = 0.5 is not supported": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("message", BAD_ROPES)
def test_impossible_rope_settings_are_refused(tmp_path: Path, message: str) -> None:
    assert message in refusal(write(tmp_path, rope_scaling=BAD_ROPES[message]))


# ------------------------------------------------------ config.json's other fields

BAD_FIELDS = [("hidden_size", 32.5), ("hidden_size", True), ("num_hidden_layers", "2"), ("num_key_value_heads", 0), ("head_dim", 0),
              ("tie_word_embeddings", "false"), ("attention_bias", 1), ("rms_norm_eps", "1e-5"), ("rms_norm_eps", 0), ("bos_token_id", "1"),
              ("max_position_embeddings", 0), ("vocab_size", -1), ("eos_token_id", "2"), ("eos_token_id", [[2]]), ("eos_token_id", 2.0),
              ("eos_token_id", True), ("eos_token_id", [2, "</s>"]), ("architectures", "LlamaForCausalLM")]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_field_of_another_kind_is_refused(tmp_path: Path, name: str, value: object) -> None:
    message = refusal(write(tmp_path, **{name: value}))
    assert len(message.splitlines()) <= 2
    assert {"num_key_value_heads": "num_kv_heads", "bos_token_id": "bos_token_id"}.get(name, name) in message


OTHER_ATTENTION = [("is_causal", False), ("is_causal", None), ("sliding_window", 4), ("sliding_window", "4"), ("attention_chunk_size", 4),
                   ("layer_types", ["full_attention", "sliding_attention"]), ("per_layer_config", {"0": {"head_dim": 4}}),
                   ("text_config", {"hidden_size": 32}), ("rms_norm_eps", 10**400)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OTHER_ATTENTION)
def test_keys_that_change_what_a_token_attends_to_are_refused(name: str, value: object) -> None:
    """transformers attends to later tokens for is_causal (logits off by 4.8), and decodes with a cache of 4 for a window of 4."""
    base = CONFIG.to_hf()
    with pytest.raises(UserError, match=f"config.json: {name}"):
        LlamaConfig.from_hf(base | {name: value}, "config.json")


@pytest.mark.parametrize("changes", [{"is_causal": True}, {"sliding_window": None}, {"sliding_window": 128},
                                     {"sliding_window": 4, "layer_types": ["full_attention"] * 2}])  # fmt: skip
def test_keys_that_change_nothing_are_taken(changes: dict[str, Any]) -> None:
    assert LlamaConfig.from_hf(CONFIG.to_hf() | changes, "config.json") == CONFIG


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(tmp_path: Path) -> None:
    assert "asks for 1000000000 layers" in refusal(write(tmp_path, num_hidden_layers=10**9))


def test_a_config_nested_too_deeply_is_no_json_of_ours(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    assert "config.json can't be read as JSON" in refusal(folder)


@pytest.mark.parametrize(("error", "message"), [
    (RuntimeError("proxy says no"), r"can't be downloaded \(proxy says no\). Connect to the internet"),
    (OSError(28, "No space left on device"), r"the hub's cache can't be written .*No space left.*HF_HOME"),
])  # fmt: skip
def test_whatever_the_hub_raises_is_a_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=message):
        load_model(hf(id="someone/some-llama"), "float32", "cpu")


def test_an_end_id_of_generation_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}', encoding="utf-8")
    assert "generation_config.json: eos_token_id = ['</s>'] is not allowed" in refusal(folder)


# ------------------------------------------------------ the rotary table's length


def test_the_rotary_table_is_as_long_as_a_run_needs(tmp_path: Path) -> None:
    """4 million positions would be 11.7 GiB at once; the rows that are there are the same."""
    folder = write(tmp_path, max_position_embeddings=4_000_000)
    model = load_model(hf(path=str(folder)), "float32", "cpu").model
    assert model._rotary.shape == (8192, 2, 1, 8)
    short = model._rotary
    model.reserve_positions(9000)
    assert model._rotary.shape == (9000, 2, 1, 8)
    assert torch.equal(model._rotary[:8192], short)
    model.reserve_positions(10)
    assert len(model._rotary) == 9000


def test_an_engine_reserves_what_its_pool_or_its_limit_can_hold(tmp_path: Path) -> None:
    import kvlab

    folder = write(tmp_path, max_position_embeddings=4_000_000)
    llm = kvlab.LLM(hf(path=str(folder)), num_blocks=640, block_size=16, max_model_len=4_000_000)
    assert len(llm.engine.runner._model._rotary) == 10_240  # type: ignore[attr-defined]


def test_positions_beyond_the_first_ones_are_right(tmp_path: Path) -> None:
    """Chunks of the table join: position 70,000 has the angles of its own."""
    from kvlab.model.rope import inverse_frequencies, rotary_table

    config = replace(CONFIG, max_position_embeddings=100_000)
    table = rotary_table(config, 70_001, torch.float32, torch.device("cpu"))
    angles = 70_000.0 * inverse_frequencies(config)
    assert torch.equal(table[70_000, 0, 0], torch.cat([angles.cos()] * 2))
    assert torch.equal(table[70_000, 1, 0], torch.cat([-angles.sin(), angles.sin()]))
