"""Whether a request can ever be served: said before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.cache.free_blocks import FreeBlocks
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.stopping import end_token_ids
from kvlab.model.tokenizer import Tokenizer
from kvlab.policies.base import LayoutPolicy, RegionNeed, SlotLayout
from kvlab.types import Request, RequestTooLong, SamplingParams, UserError, wrong_caching
from kvlab.types.token_ids import token_ids


def check_request(request: Request, config: EngineConfig, policies: PolicySet, vocab_size: int | None, tokenizer: Tokenizer | None,
                  eos_token_ids: Sequence[int] = ()) -> None:  # fmt: skip
    """Raise a UserError, as `Engine.check_request` says. vocab_size: None: ids are not checked."""
    name = f"Request {request.request_id!r}"
    num_prompt, num_seqs = len(request.prompt_token_ids), request.sampling.num_sequences
    if num_prompt == 0:
        raise UserError(f"{name} has an empty prompt: at least one token is needed.")
    if token_ids(request.prompt_token_ids) is None:
        raise UserError(f"{name} has prompt_token_ids = {request.prompt_token_ids!r:.60}: a sequence of whole numbers is needed.")
    if words := wrong_caching(request.cache, request.cache_until):
        raise UserError(f"{name}: {words}.")
    if vocab_size is not None:
        low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if low < 0 or high >= vocab_size:
            raise UserError(f"{name} holds token id {low if low < 0 else high}; ids of this model are 0 to {vocab_size - 1}.")
    _check_end_ids(name, request.sampling, vocab_size, eos_token_ids)
    if num_seqs > config.max_num_seqs or (policies.batching.has_token_limit and num_seqs > config.max_num_batched_tokens):
        limit = min(config.max_num_seqs, config.max_num_batched_tokens)
        raise UserError(f"{name} decodes {num_seqs} sequences at once; max_num_seqs = {config.max_num_seqs} and max_num_batched_tokens "
                        f"= {config.max_num_batched_tokens} allow {limit}. Lower n or beam_width, or raise them.")  # fmt: skip
    if request.sampling.stop and tokenizer is None:
        raise UserError(f"{name} has stop strings, but this run has no tokenizer. Use stop_token_ids, or a model with a tokenizer.")
    if num_prompt >= config.max_model_len:
        raise RequestTooLong(f"{name}: a prompt of {num_prompt} tokens and one output token exceed max_model_len = "
                             f"{config.max_model_len}. The longest prompt that fits is {config.max_model_len - 1} tokens.")  # fmt: skip
    if policies.layout.shares_blocks:
        _check_room(name, num_prompt, config)
    else:
        _check_regions(name, request, config, policies.layout)


def _check_end_ids(name: str, sampling: SamplingParams, vocab_size: int | None, eos_token_ids: Sequence[int]) -> None:
    """An id that no token has would end nothing; below `min_tokens` some id must be left that does not end the sequence."""
    wrong = [i for i in sampling.stop_token_ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
    if wrong:
        ids = "from 0 on" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise UserError(f"{name} has {wrong[0]} in stop_token_ids; ids of this model are {ids}. Leave it out, or take the model's own.")
    end_ids = end_token_ids(sampling, eos_token_ids) if sampling.min_tokens and vocab_size is not None else ()
    if len(end_ids) == vocab_size:
        raise UserError(f"{name} has min_tokens = {sampling.min_tokens}, and every id of the vocabulary ends it (stop_token_ids, EOS): "
                        "there is no other token to choose. Leave some id out, or set min_tokens=0.")  # fmt: skip


def _check_room(name: str, num_prompt: int, config: EngineConfig) -> None:
    need = -(-num_prompt // config.block_size)
    if need > config.num_blocks:
        longest = min(config.num_blocks * config.block_size, config.max_model_len - 1)
        raise RequestTooLong(f"{name} can never fit: {num_prompt} prompt tokens need {need} blocks of {config.block_size}, there are "
                             f"{config.num_blocks}. The longest that fits is {longest} tokens; or raise num_blocks.")  # fmt: skip


def _check_regions(name: str, request: Request, config: EngineConfig, layout: LayoutPolicy) -> None:
    """Its regions must find a place in an empty pool."""
    num_prompt, num_seqs = len(request.prompt_token_ids), request.sampling.num_sequences
    if isinstance(layout, SlotLayout) and num_seqs > layout.num_slots:
        raise UserError(f"{name} decodes {num_seqs} sequences at once, and layout {type(layout).__name__} has {layout.num_slots} "
                        "slots: lower n or beam_width, or give the layout more.")  # fmt: skip
    max_output = min(request.sampling.max_tokens, config.max_model_len - num_prompt)
    size = layout.reserve_blocks(RegionNeed(-(-num_prompt // config.block_size), num_prompt, max_output, request.known_output_len,
                                            config.max_model_len, config.block_size))  # fmt: skip
    free = FreeBlocks(config.num_blocks)
    for _ in range(num_seqs):
        region = layout.place(size, free)
        if region is None:
            raise RequestTooLong(f"{name} can never fit: for {num_prompt} prompt tokens layout {type(layout).__name__} takes "
                                 f"{size} blocks of {config.block_size} for each of {num_seqs} sequences, there are "
                                 f"{config.num_blocks}. Raise num_blocks, or shorten the prompt.")  # fmt: skip
        free.take(region)
