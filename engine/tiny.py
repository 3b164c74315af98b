"""Random-weight checkpoints of a few hundred kilobytes, for tests that need a real directory to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from engine.hf_load import quiet

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>")
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "we like short tests and the 'mint' tea",
    "a relay between two regions carries tokens and the target decides",
)


def tiny_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with a chat template: ids 0.. are the special tokens, then bytes and merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_checkpoint(
    path: Path | str,
    *,
    seed: int,
    arch: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 320,
    max_length: int = 512,
    **config: Any,
) -> Path:
    """Write a checkpoint of a causal LM with random weights, a tokenizer and a generation config.

    The weights are scaled up so that the text varies with the context; two end tokens are named, one by the
    tokenizer, one by the generation config only.

    Args:
        arch: model type in transformers ("llama", "qwen2", ...).
        vocab: token ids, at least 260; the tokenizer may have fewer.
        config: further fields of the architecture's config.
    """
    path = Path(path)
    tokenizer = tiny_tokenizer(vocab)
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": max_length,
        "initializer_range": 0.25,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **(fields | config)), dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    with quiet():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
